"""The loop: reports every step once, stops and resumes exactly, and refuses before step 1 what cannot work."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vramfit.training.conftest import Kept, rows_in, small_config
from vramfit.config import RunConfig
from vramfit.data.prepare import prepare
from vramfit.errors import Changed, CheckpointError, DataError, ModelError, OutOfDisk, UserError, WontFit
from vramfit.models import stored
from vramfit.training import checkpoint, loop, run
from vramfit.training.inputs import versions
from vramfit.training.loop import CHECKPOINTS, train
from vramfit.training.samples import LEAST_TOKENS

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]
SAMPLES: dict[str, Any] = {"prompts": ["The fox"], "sample_tokens": 8}


def stop_after(recorder: Any, step: int) -> Callable[[], bool]:
    return lambda: bool(recorder.metrics) and recorder.metrics[-1].step >= step


def test_a_run_learns_and_reports_everything(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    heard = kept()
    config = small_run(schedule={"max_steps": 30}, output=SAMPLES)
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert [step.step for step in heard.metrics] == list(range(1, 31))
    assert heard.losses[-1] < 0.5 * heard.losses[0]
    assert result.steps == result.total_steps == 30
    assert not result.stopped
    assert result.final_loss == heard.losses[-1]
    assert result.eval_loss == heard.evaluations[-1].loss
    assert heard.evaluations[-1].step == 30
    assert [(sample.stage, sample.prompt) for sample in heard.samples] == [("before", "The fox"), ("after", "The fox")]
    assert result.peak_allocated_bytes == max(step.allocated_bytes for step in heard.metrics) > 0
    assert len(heard.forecasts) == 1
    assert heard.forecasts[0].workload.exact
    names = [phase.name for phase in heard.phases]
    assert names.index("tokenising") < names.index("planning") < names.index("training") < names.index("exporting")
    assert max(phase.done for phase in heard.phases if phase.name == "training") == 30


def test_every_token_is_counted_once(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    """Trained tokens of one epoch are those of the data set, whatever the micro-batch."""
    counts = []
    for micro_batch in (1, 3):
        heard = kept()
        config = small_run(schedule={"max_steps": None, "epochs": 1}, memory={"micro_batch": micro_batch})
        train(config, folder=tmp_path / f"run{micro_batch}", cache=cache, recorder=heard)
        counts.append(sum(step.tokens for step in heard.metrics))
        workload = heard.forecasts[0].workload
        expected = workload.sequences * workload.mean_tokens * workload.trained_share
        assert counts[-1] == pytest.approx(expected)
    assert counts[0] == counts[1]


def test_weights_of_messages_are_shares_of_a_step(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    """Twice all weights is the same mean, so the same run; other shares are another run. Both are told."""

    def run(first: float, second: float, loss: str = "chunked") -> Any:
        asked = [{"role": "user", "content": f"The fox number {number}"} for number in range(20)]
        answers = [{"role": "assistant", "content": "berries", "weight": first if n % 2 else second} for n in range(20)]
        path = tmp_path / f"{first}-{second}.jsonl"
        rows = [{"messages": list(pair)} for pair in zip(asked, answers, strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        heard = kept()
        config = small_run(data={"paths": [str(path)]}, memory={"loss": loss}, schedule={"max_steps": 3})
        train(config, folder=tmp_path / f"{first}-{second}-{loss}", cache=cache, recorder=heard)
        return heard

    weighted, doubled, plain, fused = run(0.5, 2), run(1, 4), run(1, 1), run(0.5, 2, "fused")
    assert doubled.losses == pytest.approx(weighted.losses, rel=1e-5)
    assert fused.losses == pytest.approx(weighted.losses, rel=1e-4)
    assert plain.losses[-1] != pytest.approx(weighted.losses[-1], rel=1e-4)
    assert [step.tokens for step in weighted.metrics] == [step.tokens for step in plain.metrics]
    told = [event.message for event in fused.events]
    assert "Answers in 20 rows have weights from 0.5 to 2; a step's loss is their weighted mean." in told
    assert "Loss chunked where answers have weights: the fused kernel takes none." in told


LONG: dict[str, Any] = {
    "schedule": {"max_steps": 13},
    "memory": {"micro_batch": 2},
    "output": {"evaluate_every": 4},
}
"""20 rows less 2 held out in steps of 3, two and one at a time: steps 6 and 12 end an epoch, 4 and 8 are evaluated."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[RunConfig, Kept, Path]:
    """A run of LONG in one go: its settings, what it reported, its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config, heard = small_config(rows_in(folder), **LONG), Kept()
    train(config, folder=folder / "run", cache=cache, recorder=heard)
    return config, heard, folder / "run"


@pytest.mark.parametrize("stops", [(1,), (4, 6), (8, 12)], ids=lambda stops: "-".join(map(str, stops)))
def test_case_118_122_resume_is_bit_exact_from_any_step(
    undisturbed: tuple[RunConfig, Kept, Path], kept: Keep, cache: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    """In mid-epoch, behind an evaluation, at an epoch's end, in later epochs, a second time, and in a moved folder."""
    config, whole, folder = undisturbed
    heard: list[Kept] = []
    for number, stop in enumerate(stops):
        heard.append(kept())
        here = tmp_path / f"{number}"
        stopping = stop_after(heard[-1], stop)
        result = train(config, folder=here, cache=cache, recorder=heard[-1], should_stop=stopping, resume=number > 0)
        assert (result.stopped, result.steps, result.export) == (True, stop, None)
        here.rename(tmp_path / f"{number + 1}")
    heard.append(kept())
    last = tmp_path / f"{len(stops)}"
    assert not train(config, folder=last, cache=cache, recorder=heard[-1], resume=True).stopped
    steps = [step for each in heard for step in each.metrics]
    assert [step.step for step in steps] == list(range(1, 14))
    assert [step.loss for step in steps] == whole.losses
    assert [step.learning_rate for step in steps] == [step.learning_rate for step in whole.metrics]
    tested = [(found.step, found.loss) for each in heard for found in each.evaluations]
    assert tested == [(found.step, found.loss) for found in whole.evaluations]
    one, other = (load_file(path / "export" / "model.safetensors") for path in (folder, last))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_case_104_the_last_step_is_always_saved_and_evaluated(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    config = small_run(schedule={"max_steps": 11}, output={"checkpoint_every": 5, "evaluate_every": 4})
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [10, 11]
    assert [evaluation.step for evaluation in heard.evaluations] == [4, 8, 11]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_case_059_the_result_renders_a_conversation_as_training_did(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A base model without a template gets the default one, also where the data comes tokenised from the cache."""
    from transformers import AutoTokenizer

    model, prepared = tiny_llama(tmp_path / "model", cache), []
    (model / "chat_template.jinja").unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(model).chat_template is None
    talks = [
        [{"role": "user", "content": f"Fox {number}?"}, {"role": "assistant", "content": f"{number} berries."}]
        for number in range(12)
    ]
    rows = tmp_path / "talks.jsonl"
    rows.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
    monkeypatch.setattr(loop, "prepare", lambda *_, **wishes: prepared.append(prepare(*_, **wishes)) or prepared[-1])
    data = {"paths": [str(rows)], "packing": False, "eval_share": 0.0}
    config = small_run(method=method, model={"source": str(model)}, data=data, schedule={"max_steps": 1})
    for name in ("first", "from the cache"):
        result = train(config, folder=tmp_path / name, cache=cache, recorder=kept())
        exported = AutoTokenizer.from_pretrained(result.export)
        trained = {example.row: example.input_ids.tolist() for example in prepared[-1].train}
        rendered = [exported.apply_chat_template(talk)["input_ids"] for talk in talks]
        assert sorted(trained.values()) == sorted(rendered)


def test_case_080_a_tied_model_in_full_is_saved_resumed_and_written(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """The starter's head is its embedding: pretrained, then its export fine-tuned in full, each saved in mid-run."""
    source = "starter"
    for method in ("pretrain", "full"):
        folder = tmp_path / method
        config = small_run(method=method, model={"source": source}, output={**QUIET, "checkpoint_every": 2})
        first = kept()
        train(config, folder=folder, cache=cache, recorder=first, should_stop=stop_after(first, 5))
        names = list(checkpoint.load(folder / CHECKPOINTS, 4).tensors)
        assert any("embed_tokens" in name for name in names)
        assert not [name for name in names if "lm_head" in name], "the table is saved once"
        result = train(config, folder=folder, cache=cache, recorder=kept(), resume=True)
        assert (result.steps, result.stopped) == (7, False)
        source = str(result.export)
        assert json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]


def test_evaluation_can_be_turned_off(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    heard = kept()
    result = train(small_run(output={"evaluate_every": 0}), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert heard.evaluations == []
    assert result.eval_loss is None


def test_resume_with_other_data_is_refused_by_name(
    small_run: Build, rows_file: Path, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    train(small_run(), folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=stop_after(heard, 2))
    rows_file.write_text(rows_file.read_text(encoding="utf-8").replace("berries", "stones"), encoding="utf-8")
    with pytest.raises(Changed, match="data was"):  # somebody has to say go on
        train(small_run(), folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)
    other = small_run(seed=7, schedule={"sequences_per_step": 2})
    with pytest.raises(CheckpointError, match=r"sequences_per_step was 3, is 2; .*seed was 42, is 7") as refused:
        train(other, folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)
    assert not isinstance(refused.value, Changed)


def test_other_data_and_libraries_are_told_and_go_on_where_that_is_chosen(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = small_run(output={"if_changed": "go on", "prompts": [], "sample_tokens": 0, "evaluate_every": 0})
    first, second = kept(), kept()
    train(chosen, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 3))
    rows_file.write_text(rows_file.read_text(encoding="utf-8").replace("fox", "hen"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="data was") as refused:
        train(chosen, folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True, if_changed="refuse")
    assert not isinstance(refused.value, Changed)
    monkeypatch.setattr(run, "versions", lambda: {**versions(), "torch": "0.1"})
    result = train(chosen, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert (result.steps, [step.step for step in second.metrics]) == (7, [4, 5, 6, 7])
    told = [event.message for event in second.events if event.kind == "changed"]
    assert len(told) == 2
    assert "It goes on with what changed since step 3: data was " in told[0]
    assert told[1].startswith("The versions changed since the checkpoint of step 3: torch was ")
    assert told[1].endswith(", is 0.1.")


def test_a_checkpoint_carries_the_rows_that_wait_for_the_database_and_not_too_many(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(output={"checkpoint_every": 2, "evaluate_every": 0, "keep_checkpoints": 9})
    first, second, waits = kept(), kept(), [{"attempt": 1, "kind": "steps", "values": {"step": 2}}]
    first.waiting = waits
    train(config, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 2))
    second.waiting = waits * 3
    monkeypatch.setattr(run, "MOST_CARRIED", 2)
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert second.restored == waits
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [2], "one with a hole behind it is not made"
    assert told(second, "checkpoint")[0] == (
        "No checkpoint was saved: 3 rows wait for the job database, and a checkpoint carries 2 at most; the last one "
        "is kept. See to it that the database can be written."
    )


def test_a_resume_that_would_train_no_step_is_refused(
    small_run: Build, rows_file: Path, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """The data that is there now is shorter, and the run is to go on with it: it has had all of its steps."""
    config = small_run(schedule={"max_steps": None, "epochs": 2}, output={"if_changed": "go on", "evaluate_every": 0})
    heard = kept()
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=stop_after(heard, 5))
    rows = rows_file.read_text(encoding="utf-8").splitlines()
    rows_file.write_text("\n".join(rows[:10]), encoding="utf-8")
    again = kept()
    with pytest.raises(CheckpointError, match=r"of step 5, and .* makes 4 steps, so none is left to train") as refused:
        train(config, folder=tmp_path / "run", cache=cache, recorder=again, resume=True)
    assert "Restore the data" in refused.value.remedy
    assert again.metrics == []
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize("early", [False, True], ids=["at its last step", "ended early"])
def test_a_run_of_which_only_the_result_was_missing_says_so_once(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Killed between its last checkpoint and its result."""
    health = {"patience": 1} if early else {}
    if early:
        losses_of_evaluations(monkeypatch, [1.0, 2.0, 3.0])
    config = small_run(output={"evaluate_every": 1 if early else 0}, health=health)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("vramfit.training.loop.export_run", interrupted)
        train(config, folder=tmp_path / "run", cache=cache, recorder=kept())
    again = kept()
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=again, resume=True)
    assert (result.stopped, again.metrics) == (False, [])
    assert result.export is not None and Path(result.export).is_dir()
    assert told(again, "resume").count("Nothing was left to train; only the result is written.") == 1


def interrupted(*_: object, **__: object) -> Path:
    raise KeyboardInterrupt


def test_resume_without_a_checkpoint_says_so_and_begins(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    train(small_run(), folder=tmp_path / "run", cache=cache, recorder=heard, resume=True)
    assert any("no checkpoint yet" in event.message for event in heard.events)
    assert len(heard.metrics) == 7


def test_case_113_a_resume_tells_of_a_checkpoint_that_lost_its_manifest_and_goes_on_from_the_one_before(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    config = small_run(output={"checkpoint_every": 2, "evaluate_every": 0, "keep_checkpoints": 5})
    first, second = kept(), kept()
    train(config, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 4))
    (tmp_path / "run" / CHECKPOINTS / "step-00000004" / checkpoint.MANIFEST).unlink()
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    (event,) = [event for event in second.events if "has lost its manifest.json" in event.message]
    assert (event.level, event.kind) == ("warning", "checkpoint")
    assert [step.step for step in second.metrics] == [3, 4, 5, 6, 7]
    assert second.losses[:2] == first.losses[2:], "the same steps again, to the same bits"
    assert checkpoint.leftovers(tmp_path / "run" / CHECKPOINTS) == []


def test_case_115_a_folder_with_checkpoints_of_another_run_is_refused_and_left_as_it_is(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """Its first checkpoint would be older by number than all of the other run's, and take their place."""
    config, old = small_run(schedule={"max_steps": 3}), tmp_path / "old" / CHECKPOINTS
    for step in (500, 600, 700):
        checkpoint.save(old, step=step, tensors={"w": torch.ones(2)}, values={}, keep=3)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another run \(3, the newest of step 700\)"):
        train(config, folder=tmp_path / "old", cache=cache, recorder=kept())
    assert checkpoint.steps(old) == [500, 600, 700]
    assert checkpoint.damaged(old) == []


def test_case_107_the_same_seed_gives_the_same_run(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    runs = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        heard = kept()
        config = small_run(seed=seed, schedule={"max_steps": 3}, output=SAMPLES)
        train(config, folder=tmp_path / name, cache=cache, recorder=heard)
        runs.append((heard.losses, [sample.text for sample in heard.samples]))
    assert len(runs[0][1]) == 2
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def tiny_llama(folder: Path, cache: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from vramfit.starter.shape import architecture
    from vramfit.starter.tokenizer import tokenizer_folder

    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache)).save_pretrained(folder)
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=architecture().vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def test_adapters_of_a_hubs_model_ask_before_they_go_on_with_another_commit_of_it(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a cache made by hand, without the network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place = tmp_path / "hub" / "models--someone--tiny"
    for letter in "ab":
        tiny_llama(place / "snapshots" / (letter * 40), cache)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40, encoding="ascii")
    config = small_run(method="lora", model={"source": "someone/tiny"}, output={"evaluate_every": 0})
    heard, opened, run_folder = kept(), [], tmp_path / "run"
    stop = stop_after(heard, 2)
    train(config, folder=run_folder, cache=cache, recorder=heard, should_stop=stop, opened=lambda: opened.append(1))
    assert opened == [1]
    assert checkpoint.load(run_folder / CHECKPOINTS, 2).values["identity"]["base"] == "a" * 40
    (place / "refs" / "main").write_text("b" * 40, encoding="ascii")
    with pytest.raises(Changed, match=f"base was {'a' * 40}, is {'b' * 40}"):
        train(config, folder=run_folder, cache=cache, recorder=kept(), resume=True)
    again = kept()
    train(config, folder=run_folder, cache=cache, recorder=again, resume=True, if_changed="go on")
    assert [step.step for step in again.metrics] == [3, 4, 5, 6, 7]
    assert any(f"base was {'a' * 40}" in message for message in told(again, "changed"))


def test_case_107_adapters_begin_the_same_whatever_was_drawn_before(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """The first checkpoint after a step too small to see: the adapters as they began, and the seed in its manifest."""
    model = str(tiny_llama(tmp_path / "model", cache))
    schedule = {"max_steps": 5, "learning_rate": 1e-30, "weight_decay": 0.0}
    begun, losses = [], []
    for name, seed, drawn in (("a", 5, 0), ("b", 5, 1000), ("c", 6, 0)):
        torch.manual_seed(drawn)
        torch.rand(drawn)
        heard = kept()
        config = small_run(seed=seed, method="lora", model={"source": model}, schedule=schedule)
        train(config, folder=tmp_path / name, cache=cache, recorder=heard, should_stop=stop_after(heard, 5))
        found = checkpoint.newest(tmp_path / name / CHECKPOINTS)
        assert found is not None
        assert found.checkpoint.values["identity"]["seed"] == seed
        tensors = found.checkpoint.tensors
        begun.append({key: tensors[key] for key in tensors if key.startswith("model.") and "lora_A" in key})
        losses.append(heard.losses)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5
    assert begun[0].keys() == begun[1].keys() == begun[2].keys()
    assert begun[0]
    assert all(torch.equal(begun[0][key], begun[1][key]) for key in begun[0])
    assert not any(torch.equal(begun[0][key], begun[2][key]) for key in begun[0])


@pytest.mark.parametrize(("rows", "epochs", "updates"), [(3, 2, 2), (7, 1, 2), (8, 2, 4), (12, 1, 3), (10, 1, 3)])
def test_case_098_099_the_tail_of_an_epoch_is_one_update_of_its_own_size(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, rows: int, epochs: int, updates: int
) -> None:
    """Four sequences a step, one by one and all at once: the same updates, also where an epoch ends in fewer."""
    data = tmp_path / "few.jsonl"
    lines = [json.dumps({"text": f"Fox {number} found {'many ' * number} berries."}) for number in range(rows)]
    data.write_text("\n".join(lines), encoding="utf-8")
    found = []
    for micro_batch in (1, 4):
        heard = kept()
        config = small_run(
            data={"paths": [str(data)], "eval_share": 0.0, "packing": False, "max_length": 64},
            schedule={"max_steps": None, "epochs": epochs, "sequences_per_step": 4},
            memory={"micro_batch": micro_batch, "precision": "fp32"},
            output={"sample_tokens": 0},
        )
        train(config, folder=tmp_path / f"run{micro_batch}", cache=cache, recorder=heard)
        found.append(heard)
    assert [len(heard.metrics) for heard in found] == [updates, updates]
    assert found[0].losses == pytest.approx(found[1].losses, rel=1e-4)
    assert [step.tokens for step in found[0].metrics] == [step.tokens for step in found[1].metrics]
    per_epoch = sum(step.tokens for step in found[0].metrics) / epochs
    assert sum(step.tokens for step in found[0].metrics[: updates // epochs]) == per_epoch
    assert [step.grad_norm for step in found[0].metrics] == pytest.approx(
        [step.grad_norm for step in found[1].metrics], rel=1e-3
    )


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_case_100_the_rate_falls_by_update_and_ends_where_it_was_promised(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, micro_batch: int
) -> None:
    """Linear, 3 of 10 updates to warm up, 4 sequences in each: the rate counts updates, not micro-batches."""
    heard = kept()
    config = small_run(
        schedule={
            "max_steps": 10, "sequences_per_step": 4, "learning_rate": 1.0e-3, "shape": "linear", "warmup_share": 0.3,
            "final_rate_share": 0.1,
        },
        memory={"micro_batch": micro_batch},
        output={"sample_tokens": 0, "evaluate_every": 0},
    )  # fmt: skip
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    rising = [1e-3 * step / 3 for step in (1, 2, 3)]
    falling = [1e-3 * (1 - 0.9 * step / 7) for step in range(1, 8)]
    assert [step.learning_rate for step in heard.metrics] == pytest.approx(rising + falling)
    assert heard.metrics[-1].learning_rate == pytest.approx(1e-4)


def test_case_062_a_held_out_row_without_its_answer_makes_no_loss_that_is_no_number(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """One row in four is longer than the maximum: its answer is cut off, and so it is left out and told."""
    data = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Fox {n} " * (200 if n % 4 == 0 else 1), "completion": f"found {n} berries"} for n in range(20)]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    heard = kept()
    config = small_run(
        data={"paths": [str(data)], "eval_share": 0.3, "most_dropped_share": 0.5},
        output={"sample_tokens": 0, "evaluate_every": 1},
        schedule={"max_steps": 3},
    )
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert all(0 < evaluation.loss < 20 and evaluation.tokens > 0 for evaluation in heard.evaluations)
    assert len(heard.evaluations) >= 3
    assert result.eval_loss == heard.evaluations[-1].loss
    assert any(
        "5 of 20 rows" in event.message and "lies beyond the maximum length" in event.message for event in heard.events
    )


@pytest.mark.parametrize(
    ("section", "settings", "error", "words"),
    [
        ("data", {"paths": ["/absent/rows.json"]}, DataError, "rows.json"),
        ("model", {"source": "/absent/model"}, ModelError, "/absent/model"),
        ("memory", {"budget_gib": 0.001}, WontFit, "budget|needs"),
    ],
)
def test_what_cannot_work_is_refused_before_step_1(
    small_run: Build,
    kept: Keep,
    cache: Path,
    tmp_path: Path,
    section: str,
    settings: dict[str, Any],
    error: type[UserError],
    words: str,
) -> None:
    heard = kept()
    with pytest.raises(error, match=words):
        train(small_run(**{section: settings}), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert heard.metrics == []


def test_steps_without_a_finite_result_end_the_run(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate that is not a number spoils the weights at step 1; every step after it is refused, then the run ends."""
    monkeypatch.setattr("vramfit.training.run.learning_rate_at", lambda step, **_: float("nan"))
    heard = kept()
    with pytest.raises(UserError, match="8 steps in a row up to step 9"):
        train(small_run(schedule={"max_steps": 20}), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert [step.skipped for step in heard.metrics] == [False] + [True] * 8
    assert [event.kind for event in heard.events].count("not-finite") == 8


def test_all_rows_of_a_refused_step_are_in_the_log(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The sentence names eight; the one to blame may be another."""
    monkeypatch.setattr("vramfit.training.run.learning_rate_at", lambda step, **_: float("nan"))
    config = small_run(
        data={"packing": False}, schedule={"sequences_per_step": 18}, health={"refused_steps": 1}, output=QUIET
    )
    with pytest.raises(UserError, match="and 10 more of the data"):
        train(config, folder=tmp_path / "run", cache=cache, recorder=kept())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 2 held rows ")]
    rows = [int(row) for row in line.removeprefix("step 2 held rows ").removesuffix(" of the data").split(", ")]
    assert len(rows) == 18 and rows == sorted(set(rows)) and set(rows) <= set(range(1, 21))


def test_a_stop_at_the_last_step_finishes_and_a_second_resume_knows_the_result(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    first = kept()
    done = train(small_run(), folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 7))
    again = train(small_run(), folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)
    assert not done.stopped
    assert (again.steps, again.final_loss, again.eval_loss) == (7, done.final_loss, done.eval_loss)
    assert again.peak_allocated_bytes == done.peak_allocated_bytes


def test_more_rows_at_once_than_planned_stay_so_when_the_run_is_resumed(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial on a card found that three are faster than the one that was planned; only new runs try."""
    from vramfit.training.run import Run

    whole, first, second, tried = kept(), kept(), kept(), []

    def three(self: Any, *_: Any, **__: Any) -> None:
        tried.append(self.micro_batch)
        self.micro_batch = self.care.micro_batch = 3

    monkeypatch.setattr(Run, "tries_rows", lambda self, run_s: True)
    monkeypatch.setattr(Run, "try_rows", three)
    config = small_run(memory={"micro_batch": 1})
    train(config, folder=tmp_path / "whole", cache=cache, recorder=whole)
    train(config, folder=tmp_path / "cut", cache=cache, recorder=first, should_stop=stop_after(first, 3))
    train(config, folder=tmp_path / "cut", cache=cache, recorder=second, resume=True)
    assert tried == [1, 1]
    assert first.losses + second.losses == whole.losses


@pytest.mark.parametrize("batches", [0, 2])
def test_a_stop_ends_an_evaluation_and_the_resume_makes_up_for_it(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, batches: int
) -> None:
    """Held-out sequences go through the model one at a time: it is stopped before the first, or the third."""
    config = small_run(
        data={"eval_share": 0.3},
        memory={"micro_batch": 1},
        schedule={"max_steps": 4},
        output={**QUIET, "evaluate_every": 2},
    )
    first, second = kept(), kept()

    def stop() -> bool:
        begun = [phase for phase in first.phases if (phase.name, phase.done) == ("evaluating", 2)]
        return bool(first.metrics) and first.metrics[-1].step >= 2 and len(begun) >= batches

    result = train(config, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop)
    assert (result.stopped, result.steps, first.evaluations) == (True, 2, [])
    shown = [phase.detail[:2] for phase in first.phases if phase.name == "evaluating" and phase.unit == "steps"]
    assert shown == ["", "1 "][:batches]
    assert checkpoint.load(tmp_path / "run" / CHECKPOINTS, 2).values["owes_evaluation"]
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert [found.step for found in second.evaluations] == [2, 4]
    assert not checkpoint.load(tmp_path / "run" / CHECKPOINTS, 4).values["owes_evaluation"]


def test_a_stop_that_comes_during_a_save_ends_the_run_at_that_step(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    config = small_run(output={**QUIET, "checkpoint_every": 3})
    saving = lambda: any(phase.name == "saving" for phase in heard.phases)  # noqa: E731
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=saving)
    assert (result.stopped, result.steps) == (True, 3)
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [3]


def test_another_amount_of_free_memory_does_not_change_what_is_resumed(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    """The plan may differ at the resume; the micro-batch stays, for it decides the last bits."""
    whole, first, second = kept(), kept(), kept()
    narrow, wide = small_run(memory={"micro_batch": 1}), small_run(memory={"micro_batch": 3})
    train(narrow, folder=tmp_path / "whole", cache=cache, recorder=whole)
    train(narrow, folder=tmp_path / "cut", cache=cache, recorder=first, should_stop=stop_after(first, 3))
    train(wide, folder=tmp_path / "cut", cache=cache, recorder=second, resume=True)
    assert first.losses + second.losses == whole.losses


def test_damaged_weights_are_refused_before_the_data_is_read(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = '{"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, '
    shape += '"num_attention_heads": 2, "vocab_size": 64}'
    (folder / "config.json").write_text(shape, encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    heard = kept()
    with pytest.raises(ModelError, match="Git LFS pointer"):
        train(small_run(model={"source": str(folder)}, method="full"), folder=tmp_path, cache=cache, recorder=heard)
    assert "tokenising" not in [phase.name for phase in heard.phases]


def test_a_text_that_cannot_be_written_does_not_undo_a_finished_run(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def overflows_later(*_: object, **__: object) -> str:
        if written:
            raise ModelError("The model's output is not finite numbers")
        written.append("once")
        return "once"

    monkeypatch.setattr("vramfit.training.run.generate", overflows_later)
    heard = kept()
    config = small_run(schedule={"max_steps": 1}, output=SAMPLES)
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert result.export is not None
    assert [event.message for event in heard.events if event.kind == "sample"] == [
        "The model's output is not finite numbers"
    ]


def test_a_text_ends_when_its_time_is_over_and_says_so(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vramfit.training.samples.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("vramfit.training.samples.MOST_SHARE", 0.0)
    heard = kept()
    config = small_run(schedule={"max_steps": 1}, output={"prompts": ["The fox", "A bear"], "sample_tokens": 40})
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)

    texts = [phase for phase in heard.phases if phase.detail == "text before training"]
    assert [(phase.done, phase.total, phase.unit) for phase in texts] == 2 * [
        (tokens, 40, "tokens") for tokens in range(LEAST_TOKENS + 1)
    ]
    said = told(heard, "sample")
    assert len(said) == 4 and all(
        f" training ends after {LEAST_TOKENS} of 40 tokens: one takes " in each for each in said
    )


def test_a_stop_ends_a_text_and_leaves_no_half_of_one(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    config = small_run(output={"prompts": ["The fox"], "sample_tokens": 40})
    writing = lambda: any(phase.unit == "tokens" and phase.done == 3 for phase in heard.phases)  # noqa: E731
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=writing)
    assert (result.stopped, result.steps, heard.samples) == (True, 0, [])
    assert max(phase.done for phase in heard.phases if phase.unit == "tokens") == 3


# ---- precision and health -------------------------------------------------------------------------------------------

QUIET = {"prompts": [], "sample_tokens": 0}


def kinds(heard: Any) -> list[str]:
    return [event.kind for event in heard.events]


def told(heard: Any, kind: str) -> list[str]:
    return [event.message for event in heard.events if event.kind == kind]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


@pytest.fixture
def tiny_model(tmp_path: Path, cache: Path) -> str:
    """16-bit numbers are slow on this machine: two blocks of 16."""
    return str(tiny_llama(tmp_path / "model", cache))


def test_what_a_run_computes_in_is_told(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    heard = kept()
    train(small_run(output=QUIET), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert told(heard, "precision") == [
        "Products are computed in fp32, the loss and sums in fp32; weights are stored in fp32."
    ]
    assert told(heard, "attention") == [
        "Attention is sdpa: torch's scaled_dot_product_attention, which takes flash attention here."
    ]
    assert heard.drifts == []


def test_the_format_of_what_compressed_blocks_keep_is_told(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    config = small_run(memory={"activations": "compress"}, output=QUIET, schedule={"max_steps": 1})
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert told(heard, "activations") == ["What compressed blocks keep is in int8: cpu does not compute in fp8."]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_checks_against_fp32_leave_the_training_as_it_is(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str, precision: str
) -> None:
    found = {}
    for every in (0, 2):
        heard = kept()
        config = small_run(
            method="lora",
            adapter={"dropout": 0.2},
            model={"source": tiny_model},
            memory={"precision": precision},
            health={"calibrate_every": every},
            output={**QUIET, "export": "merged"},
        )
        train(config, folder=tmp_path / str(every), cache=cache, recorder=heard)
        found[every] = heard
    assert [check.step for check in found[2].drifts] == [2, 4, 6, 7]
    assert all(0 < max(check.loss, check.grad_norm) < 0.2 and check.raised == "" for check in found[2].drifts)
    assert found[0].drifts == []
    assert found[0].losses == found[2].losses
    one, other = weights_of(tmp_path / "0"), weights_of(tmp_path / "2")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_fp16_is_checked_by_itself_every_ten_steps(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str
) -> None:
    heard = kept()
    config = small_run(
        method="full",
        model={"source": tiny_model},
        memory={"precision": "fp16"},
        schedule={"max_steps": 10},
        output=QUIET,
    )
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert [check.step for check in heard.drifts] == [10]
    assert heard.metrics[-1].loss_scale == 2.0**16


def test_a_drift_is_told_and_what_drifts_is_raised_and_stays_so_over_a_resume(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str
) -> None:
    """A limit that bf16 cannot keep: every part is raised at the first check, and then there is nothing to check."""
    config = small_run(
        method="full",
        model={"source": tiny_model},
        memory={"precision": "bf16"},
        health={"calibrate_every": 2, "drift_limit": 1e-9, "raise_precision": True},
        output=QUIET,
    )
    first, second, plain = kept(), kept(), kept()
    train(config, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 3))
    assert [(check.step, check.raised) for check in first.drifts] == [
        (2, ""), (2, "head"), (2, "head, norms"), (2, "head, norms, all"),
    ]  # fmt: skip
    assert (first.drifts[-1].loss, first.drifts[-1].grad_norm) == (0, 0)
    assert [event.level for event in first.events if event.kind == "drift"] == ["warning", "info"]
    assert "Computed in fp32 from now on: head, norms, all; the drift is 0% of the loss" in told(first, "drift")[1]
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert second.drifts == []  # it computes in fp32, so there is nothing to compare
    assert told(second, "drift") == []
    whole = kept()
    train(config, folder=tmp_path / "whole", cache=cache, recorder=whole)
    assert first.losses + second.losses == whole.losses
    train(
        config.model_copy(update={"health": type(config.health)()}),
        folder=tmp_path / "plain",
        cache=cache,
        recorder=plain,
    )
    assert plain.losses[:1] == whole.losses[:1]
    assert plain.losses[1:] != whole.losses[1:]


def test_a_drift_above_the_limit_is_told_once(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str
) -> None:
    heard = kept()
    config = small_run(
        method="full",
        model={"source": tiny_model},
        memory={"precision": "bf16"},
        health={"calibrate_every": 1, "drift_limit": 1e-9},
        output=QUIET,
    )
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert len(heard.drifts) == 7
    [message] = told(heard, "drift")
    assert message.startswith("bf16 strays from fp32: the loss by ") and "limit is 1e-07%" in message


def test_a_run_in_fp32_has_no_drift_and_says_so_when_asked(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    train(small_run(health={"calibrate_every": 2}, output=QUIET), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert heard.drifts == []
    assert told(heard, "drift") == ["The run computes in fp32: there is no drift from it to check."]


def test_a_check_that_has_no_room_is_told_and_not_tried_again(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vramfit.engine.resident import ResidentExecutor

    tried = []

    def no_room(self: Any, piece: Any, **_: Any) -> Any:
        tried.append(piece.rows)
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(ResidentExecutor, "measure", no_room)
    heard = kept()
    config = small_run(
        method="full",
        model={"source": tiny_model},
        memory={"precision": "bf16", "micro_batch": 3},
        health={"calibrate_every": 2},
        output=QUIET,
    )
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert tried == [3, 2, 1]
    assert len(heard.metrics) == 7
    [message] = told(heard, "drift")
    assert "has no room in fp32" in message


def test_refused_steps_name_their_rows_and_leave_the_good_checkpoints(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 5 on no update is possible. The checkpoints of 3 and 4 are the last good ones and stay."""
    from vramfit.engine.resident import ResidentExecutor
    from vramfit.models.load import load_model

    heard, steps = kept(), []
    taken = ResidentExecutor.step

    def listened(self: Any, micro_batches: Any, learning_rate: float) -> Any:
        steps.append(micro_batches)
        return taken(self, micro_batches, learning_rate)

    def spoilt_later(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        model.model.norm.register_forward_hook(
            lambda module, hidden, output: output * torch.nan if len(heard.metrics) >= 4 else output
        )
        return model

    monkeypatch.setattr(ResidentExecutor, "step", listened)
    monkeypatch.setattr("vramfit.training.opening.load_model", spoilt_later)
    config = small_run(
        data={"packing": False},
        health={"refused_steps": 3},
        schedule={"max_steps": 20},
        output={**QUIET, "checkpoint_every": 1, "evaluate_every": 0},
    )
    with pytest.raises(UserError, match="3 steps in a row up to step 7") as caught:
        train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    rows = sorted({row + 1 for batch in steps[-1] for row in batch.rows})
    assert len(rows) == 3
    assert f"rows {', '.join(map(str, rows))} of the data" in caught.value.what
    assert [event.step for event in heard.events if event.kind == "not-finite"] == [5, 6, 7]
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [3, 4]
    assert any("last good one is kept" in message for message in told(heard, "checkpoint"))


def test_spoilt_weights_are_neither_saved_nor_exported(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of the last step makes no numbers of the weights, which that step's own loss cannot show."""
    from vramfit.engine.schedule import learning_rate_at

    monkeypatch.setattr(
        "vramfit.training.run.learning_rate_at",
        lambda step, **others: float("nan") if step == 7 else learning_rate_at(step, **others),
    )
    heard = kept()
    with pytest.raises(UserError, match="After step 7 the weights are not finite"):
        train(
            small_run(output={**QUIET, "checkpoint_every": 1, "evaluate_every": 0}),
            folder=tmp_path / "run",
            cache=cache,
            recorder=heard,
        )
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [5, 6]
    assert not (tmp_path / "run" / "export").exists()


def test_a_collapsed_scale_ends_the_run_with_a_remedy(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that overflow at any scale: 22 steps are skipped on the way down, each counted; the 23rd ends it."""
    from vramfit.models.load import load_model

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        model = load_model(*args, **kwargs)
        model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
        return model

    monkeypatch.setattr("vramfit.training.opening.load_model", overflowing)
    heard = kept()
    config = small_run(
        method="full",
        model={"source": tiny_model},
        memory={"precision": "fp16"},
        schedule={"max_steps": 60},
        health={"calibrate_every": 0},
        output=QUIET,
    )
    with pytest.raises(UserError, match="loss scale has fallen") as caught:
        train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert caught.value.remedy.startswith("Choose bf16 or fp32")
    assert len(heard.metrics) == sum(step.skipped for step in heard.metrics) == 23
    assert heard.metrics[-1].loss_scale == 2.0**-7


def test_a_step_without_trained_tokens_is_refused_by_its_rows(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading leaves such rows out; should one come through all the same, the step that holds it is refused."""
    from dataclasses import replace

    from vramfit.data.prepare import prepare

    def untrained_third(*args: Any, **kwargs: Any) -> Any:
        data = prepare(*args, **kwargs)
        return replace(
            data, train=[replace(example, trained=example.trained & (example.row != 2)) for example in data.train]
        )

    monkeypatch.setattr("vramfit.training.loop.prepare", untrained_third)
    config = small_run(
        data={"packing": False, "eval_share": 0.0},
        schedule={"sequences_per_step": 1, "max_steps": None, "epochs": 1},
        output=QUIET,
    )
    heard = kept()
    with pytest.raises(DataError, match=r"0 trained tokens \(step \d+: row 3 of the data\)"):
        train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert len(heard.metrics) < 20


def losses_of_evaluations(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    """What the evaluations of a run say, one after another; all else is as it is."""
    from vramfit.engine.resident import ResidentExecutor

    waiting = iter(losses)
    usual = ResidentExecutor.evaluate

    def evaluate(self: Any, batches: Any) -> tuple[float, int]:
        _, tokens = usual(self, batches)  # which a stop ends: then nothing was said
        return next(waiting), tokens

    monkeypatch.setattr(ResidentExecutor, "evaluate", evaluate)


def test_a_run_that_improves_no_more_ends_early_and_finishes(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of_evaluations(monkeypatch, [3.0, 2.0, 2.1, 2.0, 1.0])
    heard = kept()
    config = small_run(health={"patience": 2}, output={**QUIET, "evaluate_every": 1, "checkpoint_every": 100})
    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert (result.steps, result.total_steps, result.stopped) == (4, 7, False)
    assert result.export is not None
    assert told(heard, "early-stop") == ["2 tests in a row were not better than 2.0000 at step 2: the run ends here."]
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [4]
    again = train(config, folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)
    assert (again.steps, again.stopped) == (4, False)


def test_the_best_is_kept_through_rotation_and_exported(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of_evaluations(monkeypatch, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.5])
    heard = kept()
    output = {**QUIET, "evaluate_every": 1, "checkpoint_every": 1, "keep_checkpoints": 2, "keep_best": True}
    result = train(small_run(output=output), folder=tmp_path / "run", cache=cache, recorder=heard)
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [2, 6, 7]
    assert told(heard, "best") == ["Step 2 is exported: its test was the best, 1.0000; the last gave 2.5000."]
    assert (result.steps, result.eval_loss) == (7, 1.0)
    short = kept()
    monkeypatch.undo()
    stopped = train(
        small_run(output=output),
        folder=tmp_path / "short",
        cache=cache,
        recorder=short,
        should_stop=stop_after(short, 2),
    )
    assert stopped.steps == 2
    kept_state = checkpoint.load(tmp_path / "short" / CHECKPOINTS, 2).tensors
    exported = weights_of(tmp_path / "run")
    assert all(torch.equal(exported[name], kept_state[f"model.{name}"]) for name in exported)


def test_every_nth_step_is_saved_and_stays_for_good(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    output = {**QUIET, "checkpoint_every": 4, "keep_checkpoints": 1, "keep_every": 3}
    train(small_run(output=output), folder=tmp_path / "run", cache=cache, recorder=kept())
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [3, 6, 7]


def test_case_123_a_full_disk_in_mid_save_leaves_the_older_checkpoint_from_which_it_goes_on(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(output={**QUIET, "checkpoint_every": 2})
    whole, first, second = kept(), kept(), kept()
    train(config, folder=tmp_path / "whole", cache=cache, recorder=whole)
    write = stored.write_tensors

    def fill_up(path: Path, tensors: Any) -> int:
        write(path, tensors)
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return path.stat().st_size

    monkeypatch.setattr(stored, "write_tensors", fill_up)
    with pytest.raises(OutOfDisk, match="The disk filled up while a checkpoint"):
        train(config, folder=tmp_path / "run", cache=cache, recorder=first)
    assert [path.name for path in (tmp_path / "run" / CHECKPOINTS).iterdir()] == ["step-00000002"]
    monkeypatch.undo()
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert first.losses[:2] + second.losses == whole.losses


def test_a_checkpoint_whole_by_its_hashes_that_holds_something_else_is_refused_by_name(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run" / CHECKPOINTS
    checkpoint.save(root, step=3, tensors={"w": torch.ones(2)}, values={"identity": 7}, keep=2)
    with pytest.raises(CheckpointError, match="step-00000003 does not hold what this run saves"):
        train(small_run(output=QUIET), folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)


def test_the_best_is_saved_when_no_checkpoint_is_due_and_known_after_a_resume(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of_evaluations(monkeypatch, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    first, second = kept(), kept()
    config = small_run(output={**QUIET, "evaluate_every": 1, "checkpoint_every": 100, "keep_best": True})
    train(config, folder=tmp_path / "run", cache=cache, recorder=first, should_stop=stop_after(first, 4))
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [2, 4]
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [2, 4, 7]
    assert len(told(second, "best")) == 1


def test_a_damaged_best_is_told_and_the_last_state_exported(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses_of_evaluations(monkeypatch, [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    heard = kept()
    config = small_run(output={**QUIET, "evaluate_every": 1, "keep_best": True, "checkpoint_every": 100})

    def stop() -> bool:
        best = tmp_path / "run" / CHECKPOINTS / "step-00000002" / "tensors.safetensors"
        if best.is_file():
            best.write_bytes(best.read_bytes()[:-1])
        return False

    result = train(config, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=stop)
    assert result.eval_loss == 2.0
    [message] = told(heard, "best")
    assert message.startswith("The last state is exported, not the best")


def test_a_spike_is_told_at_its_step(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 30's rate throws the weights far off: the loss of step 31 is the spike."""
    monkeypatch.setattr(
        "vramfit.training.run.learning_rate_at",
        lambda step, **others: 1.0 if step == 30 else 1e-4,
    )
    heard = kept()
    config = small_run(schedule={"max_steps": 33}, output={**QUIET, "evaluate_every": 0})
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert [event.step for event in heard.events if event.kind == "loss-spike"] == [31]
