"""Wishes that change nothing: refused by name where they ask for something, told by name where they idle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vramfit.planning.test_wishes import planned, without_card
from vramfit.config import RunConfig
from vramfit.errors import ConfigError
from vramfit.planning.idle_wishes import is_idle


def asked(**sections: Any) -> RunConfig:
    return RunConfig.parse({"method": "lora", "model": {"source": "some/model"}, **sections})


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"output": {"keep_best": True, "evaluate_every": 0}}, "output.keep_best", "evaluate_every is 0"),
        ({"output": {"keep_best": True}, "data": {"eval_share": 0}}, "output.keep_best", "eval_share is 0"),
        ({"health": {"patience": 3}, "output": {"evaluate_every": 0}}, "health.patience", "evaluate_every is 0"),
        ({"health": {"patience": 3}, "data": {"eval_share": 0}}, "health.patience", "eval_share is 0"),
        ({"output": {"evaluate_every": 5}, "data": {"eval_share": 0}}, "output.evaluate_every", "eval_share is 0"),
        ({"health": {"raise_precision": True, "calibrate_every": 0}}, "health.raise_precision", "calibrate_every is 0"),
        ({"memory": {"activations": "compress", "compile": "default"}}, "memory.compile", "are compressed"),
    ],
)
def test_what_nothing_could_fulfil_is_refused_where_it_is_written(
    sections: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(**sections)
    (problem,) = refused.value.problems
    assert problem.field == field and problem.what.startswith(field) and words in problem.what and problem.remedy


def test_all_of_them_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        asked(output={"keep_best": True, "evaluate_every": 0}, health={"patience": 2, "raise_precision": True})
    assert [problem.field for problem in refused.value.problems] == ["output.keep_best", "health.patience"]


@pytest.mark.parametrize(
    "sections",
    [
        {"output": {"keep_best": True}, "health": {"patience": 3}},
        {"output": {"evaluate_every": 0}},
        {"data": {"eval_share": 0}},
        {"memory": {"activations": "compress"}},
        {"memory": {"activations": "recompute", "compile": "default"}},
    ],
)
def test_what_can_be_had_is_not_refused(sections: dict[str, Any]) -> None:
    asked(**sections)


@pytest.mark.parametrize(
    ("precision", "every", "refused"),
    [("bf16", "auto", True), ("fp32", 5, True), ("bf16", 5, False), ("fp16", "auto", False), ("tf32", 5, False)],
)
def test_precision_that_nobody_watches_is_not_raised(precision: str, every: Any, refused: bool) -> None:
    health = {"raise_precision": True, "calibrate_every": every}
    if refused:
        with pytest.raises(ConfigError, match="raise_precision has nothing to go by"):
            planned({"precision": precision}, health=health)
    else:
        planned({"precision": precision}, health=health)


@pytest.mark.parametrize(
    ("memory", "sections", "field", "reason"),
    [
        ({}, {"method": "full", "adapter": {"rank": 64}}, "adapter.rank", "The method full trains no adapter"),
        ({}, {"schedule": {"epochs": 3, "max_steps": 1000}}, "schedule.epochs", "1,000 steps were asked for"),
        ({"optimizer": "sgd"}, {"schedule": {"beta2": 0.9}}, "schedule.beta2", "sgd does not use it"),
        ({"optimizer": "adafactor"}, {"schedule": {"beta1": 0.5}}, "schedule.beta1", "adafactor does not use it"),
        ({}, {"schedule": {"shape": "constant", "final_rate_share": 0.1}}, "schedule.final_rate_share", "stays"),
        ({}, {"data": {"paths": ["a"], "most_bad_rows": 3}}, "data.most_bad_rows", "stops at the first row"),
        ({}, {"output": {"prompts": ["Once"], "sample_tokens": 0}}, "output.prompts", "0 tokens"),
        ({"precision": "fp32"}, {"health": {"calibrate_every": 5}}, "health.calibrate_every", "computes in fp32"),
        ({"precision": "bf16"}, {"health": {"drift_limit": 0.01}}, "health.drift_limit", "not compared with fp32"),
    ],
)
def test_what_changes_nothing_is_told_by_name(
    memory: dict[str, Any], sections: dict[str, Any], field: str, reason: str
) -> None:
    (told,) = [choice for choice in planned(memory, **sections).reasons if is_idle(choice)]
    assert told.setting == field and reason in told.reason and told.fixed


def test_where_everything_counts_nothing_is_told() -> None:
    plan = planned({}, method="lora", adapter={"rank": 64, "dropout": 0.1}, schedule={"epochs": 3, "beta2": 0.95})
    assert [choice for choice in plan.reasons if is_idle(choice)] == []


@pytest.mark.parametrize(
    ("memory", "changes"),
    [({"compile": "default"}, {"adapter": {"dropout": 0.1}}), ({}, {"adapter": {"start": "pissa"}})],
)
def test_what_visiting_blocks_cannot_do_keeps_them_on_the_device(
    memory: dict[str, Any], changes: dict[str, Any]
) -> None:
    """An 8B in 20 GiB of RAM would stream: so it does not fit, instead of failing when it is opened."""
    from vramfit.errors import WontFit

    machine, big = without_card(), "Qwen/Qwen3-8B"
    budget = {"budget_gib": 20.0}
    assert planned(budget, method="lora", of=big, on=machine).weights_tier == "disk"
    compiled = planned({**budget, "compile": "default"}, method="lora", of=big, on=machine)
    assert (compiled.weights_tier, compiled.compiled) == ("disk", True)
    with pytest.raises(WontFit):
        planned({**budget, **memory}, of=big, on=machine, **{"method": "lora", **changes})
