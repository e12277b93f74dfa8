"""A real model, a real data set, the real queue: SmolLM2-135M-Instruct learns from alpaca_en_demo.json by LoRA."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from jobs import processes
from jobs.job import Job
from jobs.store import Store
from vramfit.config import RunConfig
from vramfit.hardware.devices import probe
from vramfit.models.catalogue import architecture_of
from vramfit.models.load import load_model
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run
from vramfit.training import checkpoint

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft 0.21
]

ROOT = Path(__file__).parent.parent
SECONDS = 800  # a machine busy with other tests is slow, not wrong


@pytest.fixture(scope="module")
def config(reference_data: Path, smollm2_folder: Path) -> RunConfig:
    return RunConfig.parse(
        {
            "name": "SmolLM2 learns alpaca",
            "method": "lora",
            "model": {"source": str(smollm2_folder)},
            "data": {
                "paths": [str(reference_data / "datasets" / "alpaca_en_demo.json")],
                "max_length": 96,
                "eval_share": 0.012,
            },
            "adapter": {"rank": 8},
            "schedule": {"max_steps": 8, "sequences_per_step": 4, "learning_rate": 1e-3},
            "output": {"evaluate_every": 8, "sample_tokens": 12},
        }
    )


@pytest.fixture(scope="module")
def finished(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Job]]:
    data_dir = tmp_path_factory.mktemp("queue")
    with Store(data_dir) as store:
        job = store.add_job(config)
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "jobs.supervisor", "--data-dir", str(data_dir)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + SECONDS
            while not store.job(job).final and time.monotonic() < deadline:
                time.sleep(0.5)
            yield store, store.job(job)
        finally:
            owner = store.job(job).owner  # a trainer outlives its supervisor: that is the design
            supervisor.terminate()
            supervisor.wait(20)
            if owner is not None:
                processes.kill(owner)


def test_the_run_succeeds_and_the_held_out_loss_falls(finished: tuple[Store, Job]) -> None:
    store, job = finished
    assert job.state == "succeeded", (job.failure, store.log_tail(job.id, lines=20))
    first, *_, last = store.evaluations(job.id)
    assert (first.step, last.step) == (0, 8)
    assert first.tokens == last.tokens > 200
    assert last.loss < first.loss - 0.05
    assert store.series(job.id).columns["step"] == list(range(1, 9))
    assert {sample.stage for sample in store.samples(job.id)} == {"before", "after"}


def test_the_exported_adapter_loads_with_plain_peft_and_gives_the_same_logits(
    finished: tuple[Store, Job], config: RunConfig, smollm2_folder: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, job = finished
    assert job.export is not None
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32), job.export
    ).eval()
    tokens = torch.tensor([AutoTokenizer.from_pretrained(job.export)("Name three colours.")["input_ids"]])
    with torch.no_grad():
        expected = ours_after_training(job, config, tmp_path)(input_ids=tokens).logits
        got = plain(input_ids=tokens).logits
        untrained = plain.get_base_model()
        with plain.disable_adapter():
            before = untrained(input_ids=tokens).logits
    assert torch.allclose(got, expected, atol=1e-5, rtol=1e-5)
    assert (got - before).abs().max() > 0.05  # the adapter does something


def ours_after_training(job: Job, config: RunConfig, cache: Path) -> torch.nn.Module:
    """The model as the trainer had it after its last step: built anew, with the weights of the last checkpoint."""
    machine = probe(cache)
    workload = Workload(sequences=988, mean_tokens=80, longest_tokens=96)
    plan = forecast_run(config, architecture=architecture_of(config.model), machine=machine, workload=workload).plan
    model = load_model(config, plan, cache=cache).eval()
    found = checkpoint.newest(job.checkpoints)
    assert found is not None
    assert found.checkpoint.step == 8
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found.checkpoint.tensors[f"model.{name}"])
    return model


def test_prompts_carry_no_loss(finished: tuple[Store, Job]) -> None:
    _, job = finished
    assert job.forecast is not None
    assert 0.3 < job.forecast["workload"]["trained_share"] < 0.95
