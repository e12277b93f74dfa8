"""RunConfig: what the user asked for. One frozen object, one file format (JSON or YAML), checked once, at this border.

A wish is either fixed by the user or "auto"; every "auto" is decided by the planner and shown with its reason.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from vramfit.errors import ConfigError, Problem
from vramfit.places import is_file
from vramfit.yaml_text import YamlProblem, dump_yaml, load_yaml

CONFIG_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1024 * 1024

Auto = Literal["auto"]
Method = Literal["pretrain", "full", "lora", "qlora"]
Precision = Literal["fp32", "tf32", "bf16", "fp16"]

STARTER_MODEL = "starter"
STARTER_STORIES = "starter:stories"
STARTER_QUESTIONS = "starter:questions"


_MOST_NUMBERED: Final = 1_000_000
"""No choice is a number as large as this, and Python writes out no number of more than 4,300 digits."""


@cache
def _choices(annotation: Any) -> frozenset[Any]:
    """The words of a field's Literal, also of one inside a union."""
    found = get_args(annotation)
    if get_origin(annotation) is Literal:
        return frozenset(found)
    return frozenset(choice for part in found for choice in _choices(part))


class Part(BaseModel):
    """A section of the config: frozen, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes True for 1; a person who wrote `learning_rate: yes` did not mean 1."""
        if isinstance(value, bool) and "bool" not in str(cls.model_fields[info.field_name or ""].annotation):
            raise ValueError("this setting is not a yes-or-no one")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _choice_as_text(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML and JSON read the choice 8 as a number and YAML the choice off as false; the choices are texts."""
        if not isinstance(value, int):
            return value
        word = "off" if value is False else str(value) if abs(value) < _MOST_NUMBERED else ""
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        return word if word in _choices(annotation) else value


class ModelChoice(Part):
    """What is trained: `source` is "starter", a local folder in Hugging Face format, or a hub id."""

    source: Annotated[str, Field(min_length=1)] = STARTER_MODEL
    revision: str | None = None


class DataChoice(Part):
    """What it is trained on. `paths` are files, folders, or the starter's "starter:stories" / "starter:questions".

    `most_bad_rows` is how many unreadable rows may be left out (None: any number), where `bad_rows` says so.
    `most_dropped_share` is the share of the rows that can be read, 0..1, which may be left out of the training for what
    they hold or for their length without anybody having agreed to it; more refuse the run.
    `documents` is where text files are split: "auto", "whole", "blank lines", "lines", or any other text: the mark.
    """

    paths: Annotated[tuple[str, ...], Field(min_length=1)] = (STARTER_STORIES,)
    columns: dict[str, str] = Field(default_factory=dict)
    encoding: str = "auto"
    bad_rows: Literal["stop", "skip"] = "stop"
    most_bad_rows: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    most_dropped_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    documents: Annotated[str, Field(max_length=200, pattern=r"^[^\r\n]*[^\r\n\s][^\r\n]*$")] = "auto"
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] | Auto = "auto"
    too_long: Literal["cut", "drop", "split"] = "cut"
    packing: bool | Auto = "auto"
    trained_on: Literal["auto", "everything", "assistant", "last"] = "auto"
    eval_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.05


class AdapterChoice(Part):
    """LoRA: W + alpha / rank * B A on the target linears. `alpha="auto"` is twice the rank.

    `variant` is rslora where the product is scaled by alpha / sqrt(rank), dora where direction and length of W's
    columns are trained apart. `start` is what A and B begin as: "usual" is random A and zero B, the others are named
    after their papers. `experts` puts adapters of their own beside each expert of a mixture, too.
    """

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[float, Field(gt=0, le=1_000_000)] | Auto = "auto"
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    variant: Literal["lora", "rslora", "dora"] = "lora"
    start: Literal["usual", "pissa", "eva", "olora", "orthogonal"] = "usual"
    experts: bool = False


class ScheduleChoice(Part):
    """How long and how fast it learns. `max_steps`, when given, decides instead of `epochs`."""

    epochs: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    sequences_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    learning_rate: Annotated[float, Field(gt=0, le=10)] | Auto = "auto"
    shape: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    final_rate_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    weight_decay: Annotated[float, Field(ge=0.0, le=10)] = 0.01
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1_000_000_000)] = 1.0


class LossChoice(Part):
    """What is added to the cross-entropy: `z_loss` times the square of the logits' logarithmic sum of exponentials (it
    keeps logits small), and the share of the wanted probability that `label_smoothing` spreads over all tokens."""

    z_loss: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0


class HealthChoice(Part):
    """When a run is unwell. `refused_steps` without a finite loss or gradient in a row end it; so do `patience`
    evaluations without a better loss (0: never).

    Every `calibrate_every` optimizer steps a micro-batch is evaluated in fp32 too ("auto": 10 in fp16, else never);
    where loss or gradient norm differ by more than `drift_limit`, relative, the run warns, and with `raise_precision`
    it computes the part that drifts in fp32 from then on.
    """

    refused_steps: Annotated[int, Field(ge=1, le=1000)] = 8
    patience: Annotated[int, Field(ge=0, le=10_000)] = 0
    calibrate_every: Annotated[int, Field(ge=0, le=100_000_000)] | Auto = "auto"
    drift_limit: Annotated[float, Field(gt=0.0, le=10.0)] = 0.003
    raise_precision: bool = False


class MemoryWishes(Part):
    """What the planner may decide, each "auto" or fixed. `budget_gib` is GiB of device memory the run may use.

    `activations` of a block are kept, kept in 8 bits (compress), recomputed from its input, or that with the input in
    RAM (offload). `base_weights` is how qlora stores its frozen base, in 4 bits or in 8. `trained_weights` in bf16 are
    rounded stochastically; where the optimizer's states are in RAM or on disk, they have fp32 copies there instead.
    `optimizer_bits` are of the optimizer's states; `optimizer_place` "paged" lets the driver move them to RAM when
    memory runs short. `optimizer_step` in backward takes each weight's step as soon as its gradient is there: "in
    backward" passes twice where the gradient has to be clipped by its global norm, "in backward, one pass" clips by the
    norm of the step before. `adapt` lets the run change how activations are held while it is on.
    """

    budget_gib: Annotated[float, Field(gt=0, le=1_048_576)] | Auto = "auto"
    micro_batch: Annotated[int, Field(ge=1, le=65_536)] | Auto = "auto"
    precision: Precision | Auto = "auto"
    activations: Literal["auto", "keep", "compress", "recompute", "offload"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash"] = "auto"
    loss: Literal["auto", "fused", "chunked", "full"] = "auto"
    base_weights: Literal["auto", "nf4", "int8"] = "auto"
    trained_weights: Literal["auto", "fp32", "bf16"] = "auto"
    optimizer: Literal["auto", "adamw", "adafactor", "lion", "muon", "sgd"] = "auto"
    optimizer_bits: Literal["auto", "32", "8", "4"] = "auto"
    optimizer_place: Literal["auto", "device", "paged", "host"] = "auto"
    optimizer_step: Literal["auto", "after backward", "in backward", "in backward, one pass"] = "auto"
    compile: Literal["auto", "off", "default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"] = "auto"
    adapt: bool = True


class OutputChoice(Part):
    """What is kept. Cadences count optimizer steps; "auto" is about ten a run. 0 turns evaluation off.
    `keep_every` saves a checkpoint at every multiple of so many steps and keeps it for good, beside the newest
    `keep_checkpoints`; 0: none. `keep_best` keeps the checkpoint of the best evaluation, too, and exports that one.
    `automatic_resumes` is how often a run in the queue goes on by itself after its process was ended from outside and
    had made progress. `if_changed`: where data or model are others than when the run was queued, or than those of the
    checkpoint it goes on from, it pauses until somebody resumes it (ask), goes on with what is there, or is refused;
    other versions of libraries are told, and refused only with "refuse"."""

    checkpoint_every: Annotated[int, Field(ge=1, le=100_000_000)] | Auto = "auto"
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = 2
    keep_every: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    keep_best: bool = False
    automatic_resumes: Annotated[int, Field(ge=0, le=100)] = 3
    if_changed: Literal["ask", "go on", "refuse"] = "ask"
    evaluate_every: Annotated[int, Field(ge=0, le=100_000_000)] | Auto = "auto"
    prompts: tuple[str, ...] = ()
    sample_tokens: Annotated[int, Field(ge=0, le=4096)] = 120
    export: Literal["auto", "adapter", "merged", "model"] = "auto"


class RunConfig(Part):
    """One run, as asked for. The defaults are the starter: a small model that learns to tell stories on any machine.

    `device` is "auto", "cpu", "cuda:0", "xpu:0", ... `train_last_blocks` is for full fine-tuning: so many blocks train,
    the last ones, with the final norm and the head, and everything before them is frozen; None: all weights train. A
    head that is the embedding's own table stays frozen, because that lies before the frozen blocks.
    """

    version: Literal[1] = CONFIG_VERSION
    name: Annotated[str, Field(max_length=120)] = ""
    method: Method = "pretrain"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu):(0|[1-9][0-9]*))$")] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    train_last_blocks: Annotated[int, Field(ge=1, le=4096)] | None = None
    model: ModelChoice = ModelChoice()
    data: DataChoice = DataChoice()
    adapter: AdapterChoice = AdapterChoice()
    schedule: ScheduleChoice = ScheduleChoice()
    loss: LossChoice = LossChoice()
    memory: MemoryWishes = MemoryWishes()
    health: HealthChoice = HealthChoice()
    output: OutputChoice = OutputChoice()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Check nested plain values (as from JSON, YAML or a form). Raises ConfigError with every problem at once."""
        try:
            config = cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise ConfigError(_problems(error)) from None
        problems = _cross_field_problems(config)
        if problems:
            raise ConfigError(problems)
        return config

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Read a YAML or JSON file (UTF-8, with or without BOM). Raises ConfigError."""
        try:
            values = load_yaml(_text_of(path))
        except YamlProblem as error:
            what = f"{path.name} is not YAML or JSON{error.place}: {error.reason}"
            remedy = "Correct that line." if error.line else "Correct the file."
            raise ConfigError([Problem(field="", what=what, remedy=remedy)]) from None
        if not isinstance(values, dict):
            raise ConfigError(
                [
                    Problem(
                        field="",
                        what=f"{path.name} holds no settings",
                        remedy="Write `setting: value` lines, or export a run from the panel.",
                    )
                ]
            )
        return cls.parse(values)

    def to_json(self) -> str:
        """JSON text that `from_json` reads back to an equal object."""
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls.parse(json.loads(text))

    @classmethod
    def from_stored(cls, text: str) -> tuple[Self, ConfigError | None]:
        """What any version has written: the settings as far as this one understands them, the others at their defaults.
        And why they are not all as they were written; None where they are."""
        try:
            return cls.from_json(text), None
        except ConfigError as error:
            return cls._understood(json.loads(text)), error
        except (ValueError, TypeError, RecursionError):
            what, remedy = "The settings of this run cannot be read", "Start a new run with the settings it had."
            return cls(), ConfigError([Problem(field="", what=what, remedy=remedy)])

    @classmethod
    def _understood(cls, values: dict[str, Any]) -> Self:
        """Each of `values` that is one of this version's settings. They may contradict each other."""
        while True:
            try:
                return cls.model_validate(values)
            except pydantic.ValidationError as error:
                found = (item["loc"] for item in error.errors(include_url=False))
                places = {tuple(part for part in place if _is_field_name(part)) for place in found}
                removed = [_left_out(values, place) for place in places]
                if not any(removed):
                    return cls()

    def to_yaml(self) -> str:
        """YAML text, only the settings that differ from the defaults, for `python -m vramfit train`."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return dump_yaml({"version": self.version, **values})

    @property
    def trains_adapter(self) -> bool:
        return self.method in ("lora", "qlora")

    @property
    def trains_all(self) -> bool:
        """Whether every weight trains, so that a checkpoint holds the whole model."""
        return not self.trains_adapter and self.train_last_blocks is None

    @property
    def lora_alpha(self) -> float:
        return 2.0 * self.adapter.rank if self.adapter.alpha == "auto" else self.adapter.alpha

    @property
    def learning_rate(self) -> float:
        """Peak rate. Automatic ones are the field's usual ones: small models from scratch bear 1e-3 and more,
        adapters about ten times what full fine-tuning bears."""
        if self.schedule.learning_rate != "auto":
            return self.schedule.learning_rate
        return {"pretrain": 2e-3, "full": 2e-5, "lora": 2e-4, "qlora": 2e-4}[self.method]


def _text_of(path: Path) -> str:
    """The text of a settings file. Raises ConfigError."""
    try:
        size = path.stat().st_size
        if not is_file(path):
            what, remedy = f"{path} is no file", "Give the file that holds the settings."
        elif size > MAX_FILE_BYTES:
            what = f"{path} has {size:,} bytes, the most for settings is {MAX_FILE_BYTES:,}"
            remedy = "Give the file that holds the settings, not the data."
        else:
            return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        what, remedy = f"There is no file {path}", "Check the path."
    except UnicodeDecodeError:
        what, remedy = f"{path} cannot be read: it is not UTF-8 text", "Save it as a UTF-8 text file."
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        what = f"{str(path)[:200]} cannot be read: {getattr(error, 'strerror', None) or error}"
        remedy = "Check the path and its permissions."
    raise ConfigError([Problem(field="", what=what, remedy=remedy)])


_WITHOUT_LAST_BLOCKS: Final = {
    "pretrain": "a run from random weights trains all of them: frozen ones would stay random",
    "lora": "lora trains adapters beside a frozen base",
    "qlora": "qlora trains adapters beside a frozen base",
}


def _cross_field_problems(config: RunConfig) -> list[Problem]:
    """What no single field can see."""
    problems = list(_asked_in_vain(config))
    if not all(path.strip() for path in config.data.paths):
        problems.append(Problem(field="data.paths", what="data.paths holds an empty path", remedy="Name a file."))
    starter_data = [path for path in config.data.paths if path.startswith("starter:")]
    unknown = [path for path in starter_data if path not in (STARTER_STORIES, STARTER_QUESTIONS)]
    if unknown:
        problems.append(
            Problem(
                field="data.paths",
                what=f"{unknown[0]!r} is not one of the starter's data sets",
                remedy=f"Choose {STARTER_STORIES} or {STARTER_QUESTIONS}, or give a file.",
            )
        )
    if config.method == "pretrain" and config.output.export in ("adapter", "merged"):
        problems.append(
            Problem(
                field="output.export",
                what=f"Pretraining has no adapter to export as {config.output.export!r}",
                remedy="Set the export to auto or model.",
            )
        )
    if config.method in ("lora", "qlora", "full") and config.model.source == STARTER_MODEL:
        problems.append(
            Problem(
                field="method",
                what=f"The starter begins from random weights, so {config.method!r} has nothing to fine-tune",
                remedy="Choose pretrain, or give the folder of a trained model (a finished run's export will do).",
            )
        )
    if config.train_last_blocks is not None and config.method != "full":
        problems.append(
            Problem(
                field="train_last_blocks",
                what=f"train_last_blocks is {config.train_last_blocks}, and {_WITHOUT_LAST_BLOCKS[config.method]}",
                remedy="Choose the method full, or leave it empty.",
            )
        )
    if config.method == "full" and config.output.export in ("adapter", "merged"):
        problems.append(
            Problem(
                field="output.export",
                what=f"Full fine-tuning has no adapter to export as {config.output.export!r}",
                remedy="Set the export to auto or model.",
            )
        )
    return problems


def _asked_in_vain(config: RunConfig) -> Iterator[Problem]:
    """Wishes that nothing could fulfil in what was chosen beside them."""
    output, health = config.output, config.health
    why = (
        "evaluate_every is 0" if output.evaluate_every == 0 else "eval_share is 0" if not config.data.eval_share else ""
    )
    if why:
        remedy = "Set output.evaluate_every to auto." if output.evaluate_every == 0 else "Set data.eval_share above 0."
        wanting = {
            "output.keep_best": output.keep_best,
            "health.patience": health.patience > 0,
            "output.evaluate_every": output.evaluate_every not in ("auto", 0),
        }
        for field in (name for name, wanted in wanting.items() if wanted):
            yield Problem(field=field, what=f"{field} needs evaluations, and {why}: there are none", remedy=remedy)
    if health.raise_precision and health.calibrate_every == 0:
        yield Problem(
            field="health.raise_precision",
            what="health.raise_precision needs comparisons with fp32, and calibrate_every is 0: there are none",
            remedy="Set health.calibrate_every to a number of steps, such as 10.",
        )
    if config.memory.activations == "compress" and config.memory.compile not in ("auto", "off"):
        yield Problem(
            field="memory.compile",
            what="memory.compile cannot reach blocks whose activations are compressed, and all of them are",
            remedy="Set memory.compile to off, or memory.activations to auto, keep or recompute.",
        )


def _left_out(values: dict[str, Any], place: Sequence[int | str]) -> bool:
    """Remove what lies at `place`, as deep as there is something. Whether there was."""
    holder: dict[str, Any] | None = None
    key = ""
    inside: Any = values
    for part in place:
        if not isinstance(inside, dict) or part not in inside:
            break
        holder, key, inside = inside, str(part), inside[part]
    if holder is not None:
        del holder[key]
    return holder is not None


def _problems(error: pydantic.ValidationError) -> list[Problem]:
    """pydantic's findings, one per field, in our three parts.

    A union such as `int | "auto"` is reported once per member; the first member (the number) is the one to explain.
    """
    found: dict[str, Problem] = {}
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"] if _is_field_name(part))
        if field not in found:
            what, remedy = _explain(item)
            found[field] = Problem(field=field, what=f"{field or 'The config'} {what}", remedy=remedy)
    return list(found.values())


def _explain(item: ErrorDetails) -> tuple[str, str]:
    """What is wrong, with the limit and the value, and the remedy, for one of pydantic's findings."""
    value, limits = _shown(item["input"]), item.get("ctx", {})
    match item["type"]:
        case "missing":
            return "is missing", "Give it a value."
        case "extra_forbidden":
            return "is not a setting of this version", "Remove it, or check its spelling."
        case "greater_than_equal":
            return f"is {value}, the least is {limits['ge']}", f"Use {limits['ge']} or more."
        case "greater_than":
            return f"is {value}, it must be above {limits['gt']}", f"Use a number above {limits['gt']}."
        case "less_than_equal":
            return f"is {value}, the most is {limits['le']}", f"Use {limits['le']} or less."
        case "less_than":
            return f"is {value}, it must be below {limits['lt']}", f"Use a number below {limits['lt']}."
        case "int_parsing" | "int_from_float" | "int_type":
            return f"is {value}, which is not a whole number", "Write digits only, such as 16."
        case "float_parsing" | "float_type" | "finite_number":
            return f"is {value}, which is not a number", "Write digits and a point, such as 0.0002 or 2e-4."
        case "literal_error":
            return f"is {value}, which is not a choice", f"Choose {limits['expected']}."
        case "bool_parsing" | "bool_type":
            return f"is {value}, which is neither yes nor no", "Write true or false."
        case "string_too_long":
            return f"has {len(item['input'])} characters, the most is {limits['max_length']}", "Shorten it."
        case "string_too_short" | "too_short":
            return "is empty", "Give it a value."
        case "string_type" | "string_pattern_mismatch" if item["loc"][-1] == "device":
            return f"is {value}, which names no device", "Choose auto, cpu, mps, or a card such as cuda:0 or xpu:0."
        case "string_type" | "string_unicode":
            return f"is {value}, which is not text", "Write text, in quotes where it looks like a number."
        case "tuple_type" | "list_type":
            return f"is {value}, which is not a list", "Write a list, such as [one, two]."
        case "model_type" | "dict_type":
            return f"is {value}, which holds no settings", "Write `setting: value` lines below it."
        case "invalid_key":
            return "is not a setting of this version", "Remove it, or check its spelling."
        case "value_error":
            return f"is {value}, but {limits['error']}", "Give it a value of its own kind."
    return f"is {value}, which has the wrong form ({item['msg'].lower()})", "Change it."


def _is_field_name(part: int | str) -> bool:
    """False for the union-member labels pydantic puts in a location, such as `constrained-int` or `literal['auto']`."""
    return isinstance(part, int) or (part.replace("_", "").isalnum() and part not in ("int", "float", "str", "bool"))


def _shown(value: Any) -> str:
    try:
        text = reprlib.repr(value)  # bounded: YAML's anchors can name a billion values in a few lines
    except ValueError:
        text = "a number of more than 4,300 digits"
    return text if len(text) <= 60 else text[:57] + "..."
