"""A listener that keeps everything, and small runs of the starter on a few rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.planning.plan import Forecast
from vramfit.training.metrics import (
    DriftCheck,
    Evaluation,
    Event,
    PhaseProgress,
    StepMetrics,
    Telemetry,
    TextSample,
    Unstored,
)


@dataclass
class Kept:
    """A Recorder that keeps what it hears."""

    phases: list[PhaseProgress] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    metrics: list[StepMetrics] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    drifts: list[DriftCheck] = field(default_factory=list)
    samples: list[TextSample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    waiting: list[Unstored] = field(default_factory=list)
    restored: list[Unstored] = field(default_factory=list)

    def phase(self, progress: PhaseProgress) -> None:
        self.phases.append(progress)

    def forecast(self, forecast: Forecast) -> None:
        self.forecasts.append(forecast)

    def steps(self, metrics: Sequence[StepMetrics]) -> None:
        self.metrics += metrics

    def evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)

    def drift(self, check: DriftCheck) -> None:
        self.drifts.append(check)

    def sample(self, sample: TextSample) -> None:
        self.samples.append(sample)

    def event(self, event: Event) -> None:
        self.events.append(event)

    def telemetry(self, reading: Telemetry) -> None:
        raise AssertionError("the loop does not read the machine's sensors")

    def unstored(self) -> list[Unstored]:
        return self.waiting

    def restore(self, rows: Sequence[Unstored]) -> None:
        self.restored += rows

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.metrics]


@pytest.fixture
def kept() -> Callable[[], Kept]:
    return Kept


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all runs of the session: the starter's tokenizer is made once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def deep_folder(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve blocks with random weights and the starter's tokenizer, its table both embedding and head."""
    import torch
    import transformers

    from vramfit.config import ModelChoice
    from vramfit.models.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("deep")
    tokenizer = load_tokenizer(ModelChoice(), cache)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    shape = transformers.LlamaConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def rows_in(folder: Path) -> Path:
    """Twenty short rows of text that are all different."""
    path = folder / "rows.jsonl"
    lines = [
        json.dumps({"text": f"The fox number {number} found {number + 2} berries by the river."})
        for number in range(20)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def small_config(rows: Path, **sections: Any) -> RunConfig:
    """A config for a handful of steps on `rows`; keyword arguments are sections with settings to add."""
    values: dict[str, Any] = {
        "data": {"paths": [str(rows)], "max_length": 48, "eval_share": 0.1},
        "schedule": {"max_steps": 7, "sequences_per_step": 3, "learning_rate": 3e-3},
        "output": {"prompts": [], "sample_tokens": 0},
    }
    for section, settings in sections.items():
        values[section] = {**values.get(section, {}), **settings} if isinstance(settings, dict) else settings
    return RunConfig.parse(values)


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """Rows of the test's own."""
    return rows_in(tmp_path)


@pytest.fixture
def small_run(rows_file: Path) -> Callable[..., RunConfig]:
    """`small_config` of them."""
    return functools.partial(small_config, rows_file)
