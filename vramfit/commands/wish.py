"""What a command line asks for: a RunConfig, the machine it is for, and how much there is to train."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vramfit.config import STARTER_MODEL, STARTER_QUESTIONS, STARTER_STORIES, RunConfig
from vramfit.data.read import ReadOptions, guess_workload, survey
from vramfit.errors import ConfigError, HardwareError, Problem
from vramfit.hardware import catalogue as cards
from vramfit.hardware.devices import Machine, probe
from vramfit.models.architecture import Architecture
from vramfit.models.catalogue import architecture_of
from vramfit.places import cache_folder, default_data_folder
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.start import length_limit
from vramfit.sentences import say
from vramfit.starter.corpus import corpus_workload
from vramfit.yaml_text import YamlProblem, load_yaml

MAX_RAM_GIB: Final = 1_048_576
MAX_CARDS: Final = 1024
MIN_LENGTH: Final = 8
MAX_LENGTH: Final = 1_048_576
"""As data.max_length has them."""
ASSUMED_SEQUENCES: Final = 1000

_SHORT_FLAGS = {
    "model": "model.source",
    "method": "method",
    "max_length": "data.max_length",
    "micro_batch": "memory.micro_batch",
    "sequences_per_step": "schedule.sequences_per_step",
    "max_steps": "schedule.max_steps",
    "device": "device",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `estimate` and `plan` share."""
    parser.add_argument("config", nargs="?", type=Path, metavar="RUN.yaml", help="a run as exported from the panel")
    parser.add_argument("--model", help="starter, a folder, or a model id")
    parser.add_argument("--method", help="pretrain, full, lora or qlora; for a model that was named lora when not said")
    parser.add_argument("--data", action="append", metavar="PATH", help="a data file; may be given several times")
    parser.add_argument("--max-length", help="tokens per sequence")
    parser.add_argument("--micro-batch", help="sequences in one forward pass")
    parser.add_argument("--sequences-per-step", help="sequences in one optimizer step")
    parser.add_argument("--max-steps", help="optimizer steps")
    parser.add_argument("--device", help="auto, cpu, cuda:0, ...")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="any other setting by its dotted name, such as memory.loss=chunked",
    )
    add_machine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name a machine which need not be here."""
    parser.add_argument("--card", help="plan for this card of the catalogue instead of this machine")
    parser.add_argument("--cards", type=int, default=1, help="how many of that card the machine has")
    parser.add_argument("--ram-gib", type=float, help="RAM of that machine, in GiB")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks about."""

    config: RunConfig
    architecture: Architecture
    machine: Machine
    workload: Workload

    def forecast(self) -> Forecast:
        """The planner's answer. Raises UserError."""
        return forecast_run(self.config, architecture=self.architecture, machine=self.machine, workload=self.workload)


def forecast_from(options: argparse.Namespace) -> Forecast:
    """The planner's answer to the command line. Raises UserError."""
    return asked_from(options).forecast()


def asked_from(options: argparse.Namespace) -> Asked:
    """The run, the machine and how much there is to train. Raises UserError."""
    values = _values(options)
    config, assumes_method = _config(options, values), "method" not in values and _names_model(options)
    architecture = architecture_of(config.model)
    limit, named = length_limit(config, architecture), bool(options.config or options.data)
    machine = machine_from(options)
    if not named and config.model.source != STARTER_MODEL:
        note = say("assumed.data", sequences=f"{ASSUMED_SEQUENCES:,}")
        machine = dataclasses.replace(machine, notes=(*machine.notes, note))
    if assumes_method:
        machine = dataclasses.replace(machine, notes=(*machine.notes, say("assumed.method")))
    work = workload_of(config, max_length=limit, named=named)
    return Asked(config=config, architecture=architecture, machine=machine, workload=work)


def config_from(options: argparse.Namespace) -> RunConfig:
    """The file's settings, then the flags on top of them. Raises ConfigError."""
    return _config(options, _values(options))


def _config(options: argparse.Namespace, values: dict[str, Any]) -> RunConfig:
    """A model that was named is tuned with LoRA unless something says otherwise."""
    return RunConfig.parse({"method": "lora", **values} if _names_model(options) else values)


def _names_model(options: argparse.Namespace) -> bool:
    return bool(options.model) and options.model != STARTER_MODEL


def _values(options: argparse.Namespace) -> dict[str, Any]:
    """What the file and the flags say. Raises ConfigError."""
    base = RunConfig.from_file(options.config) if options.config else RunConfig()
    values = base.model_dump(mode="json", exclude_unset=True)
    for flag, setting in _SHORT_FLAGS.items():
        if getattr(options, flag) is not None:
            _put(values, setting, getattr(options, flag))
    if options.data:
        _put(values, "data.paths", list(options.data))
    for assignment in options.set:
        _put(values, *_assigned(assignment))
    return values


def _assigned(assignment: str) -> tuple[str, Any]:
    """The setting and the value of `setting=value`. Raises ConfigError."""
    setting, sign, value = assignment.partition("=")
    what = ""
    if not sign:
        what = f"--set {assignment[:60]} has no value"
    elif not all(setting.split(".")):
        what = f"--set {assignment[:60]} names no setting"
    try:
        parsed = load_yaml(value)
    except YamlProblem as error:
        what = f"The value of --set {setting[:60]} cannot be read: {error.reason}"
    if what:
        remedy = "Write it as --set setting=value, such as --set memory.loss=chunked."
        raise ConfigError([Problem(field="", what=what, remedy=remedy)])
    return setting, parsed


def check_length(length: int) -> None:
    """Raises ConfigError for a number of tokens no sequence can have."""
    if not MIN_LENGTH <= length <= MAX_LENGTH:
        what = f"--length is {length}, it must be {MIN_LENGTH} to {MAX_LENGTH:,}"
        raise ConfigError([Problem(field="", what=what, remedy="Give tokens, such as 2048.")])


def machine_from(options: argparse.Namespace) -> Machine:
    """This machine, or one with the card that was named. Raises HardwareError."""
    if options.ram_gib is not None and not (math.isfinite(options.ram_gib) and 0 < options.ram_gib <= MAX_RAM_GIB):
        raise HardwareError(
            f"--ram-gib is {options.ram_gib:g}, it must be above 0 and at most {MAX_RAM_GIB:,}",
            "Give the GiB of RAM of that machine, such as 32.",
        )
    if options.ram_gib is not None and options.card is None:
        raise HardwareError("--ram-gib is for a machine that is not here", "Name its card with --card as well.")
    if not 1 <= options.cards <= MAX_CARDS:
        raise HardwareError(f"--cards is {options.cards}, it must be 1 to {MAX_CARDS}", "Give a number such as 8.")
    if options.cards > 1 and options.card is None:
        raise HardwareError("--cards is for a machine that is not here", "Name its card with --card as well.")
    if options.card is not None:
        return cards.machine_with(cards.get(options.card), count=options.cards, ram_gib=options.ram_gib)
    return probe(default_data_folder())


def workload_of(config: RunConfig, *, max_length: int, named: bool) -> Workload:
    """How much there is to train, without tokenising: known for the starter, guessed from the files' rows otherwise.

    Where no data was named for a model of the user's, ASSUMED_SEQUENCES sequences that are all as long as allowed: what
    needs the most memory.
    """
    choice = config.data
    if not named and config.model.source != STARTER_MODEL:
        return Workload(sequences=ASSUMED_SEQUENCES, mean_tokens=max_length, longest_tokens=max_length)
    if len(choice.paths) == 1 and choice.paths[0] in (STARTER_STORIES, STARTER_QUESTIONS):
        return corpus_workload(choice.paths[0])
    from vramfit.data.prepare import data_paths

    found = survey(data_paths(choice, cache_folder(default_data_folder())), ReadOptions.of(choice))
    return guess_workload(found, max_length, packing=choice.packing, eval_share=choice.eval_share)


def _put(values: dict[str, Any], setting: str, value: Any) -> None:
    *sections, name = setting.split(".")
    place = values
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(
                [Problem(field=setting, what=f"{setting} is not a setting", remedy="Check its spelling.")]
            )
    place[name] = value
