"""What was assumed is told, and what was decided is told in sentences that any language can say."""

from __future__ import annotations

import copy
import dataclasses
import json
import string

import pytest

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture, from_config
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.reasons import ASSUMED
from vramfit.sentences import ENGLISH, Sentence, say

WORK = Workload(sequences=100, mean_tokens=500, longest_tokens=900)


def shape() -> Architecture:
    found = catalogue.find("Qwen/Qwen3-0.6B")
    assert found is not None
    return found


def planned(machine: Machine, architecture: Architecture | None = None, method: str = "lora") -> Forecast:
    config = RunConfig.parse({"method": method, "model": {"source": "m"}})
    return forecast_run(config, architecture=architecture or shape(), machine=machine, workload=WORK)


def assumed(forecast: Forecast) -> dict[str, str]:
    return {choice.value: choice.reason for choice in forecast.plan.reasons if choice.setting == ASSUMED}


def with_device(machine: Machine, **changes: object) -> Machine:
    return dataclasses.replace(machine, devices=(dataclasses.replace(machine.devices[0], **changes),))  # type: ignore[arg-type]


def test_ram_and_disk_of_a_machine_that_is_not_here_are_told() -> None:
    told = assumed(planned(machine_with("RTX 4090")))
    assert told == {"machine": "64.0 GiB of RAM and 500.0 GiB of free disk are assumed"}
    assert assumed(planned(machine_with("RTX 4090", ram_gib=128))) == {"machine": "500.0 GiB of free disk are assumed"}


@pytest.mark.parametrize(
    "unknown", [{"flops": {}}, {"memory_bandwidth": 0.0}, {"flops": {}, "memory_bandwidth": 0.0, "rates": "assumed"}]
)
def test_a_rate_that_nobody_knows_is_called_assumed(unknown: dict[str, object]) -> None:
    """Also on a card of the catalogue that has only some facts."""
    found = planned(with_device(machine_with("RTX 4090"), **unknown))
    assert found.speed.rate_source == "assumed"
    assert "no facts about GeForce RTX 4090" in assumed(found)["speed"]
    assert "GB/s" in assumed(found)["speed"]


def test_what_a_config_json_does_not_say_is_told_with_the_estimate() -> None:
    values = {
        "model_type": "mistral",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    told = assumed(planned(machine_with("RTX 4090"), from_config(values, "m")))["model"]
    assert "num_key_value_heads (8)" in told
    assert "tie_word_embeddings (false)" in told


def test_a_refusal_tells_what_was_assumed_too() -> None:
    big = catalogue.find("meta-llama/Llama-3.1-70B")
    with pytest.raises(WontFit) as caught:
        planned(machine_with("RTX 3060"), big, "full")
    assert caught.value.forecast is not None
    assert "machine" in assumed(caught.value.forecast)


def test_a_sentence_is_text_that_knows_its_name_and_numbers() -> None:
    told = say("length.longest", count=222)
    assert told == "The longest sequence has 222 tokens"
    assert json.dumps(told) == '"The longest sequence has 222 tokens"'
    assert (told.key, told.values) == ("length.longest", {"count": 222})
    again = copy.deepcopy(told)
    assert (again, again.key, again.values) == (told, told.key, told.values)


def test_every_reason_of_a_plan_is_such_a_sentence() -> None:
    found = planned(machine_with("RTX 4090"))
    texts = [choice.reason for choice in found.plan.reasons] + [other.reason for other in found.alternatives]
    assert len(texts) > 8
    for text in texts:
        assert isinstance(text, Sentence)
        names = {name for _, name, _, _ in string.Formatter().parse(ENGLISH[text.key]) if name}
        assert names == text.values.keys()


@pytest.mark.parametrize("micro_batch", ["auto", 2, 16])
def test_a_step_that_the_data_cuts_is_told(micro_batch: object) -> None:
    values = {"model": {"source": "m"}, "method": "lora", "memory": {"micro_batch": micro_batch}}
    few, enough = (
        forecast_run(
            RunConfig.parse({**values, "data": {"paths": ["x"]}, "schedule": {"sequences_per_step": 16}}),
            architecture=shape(),
            machine=machine_with("RTX 4090"),
            workload=Workload(sequences=sequences, mean_tokens=64, longest_tokens=128),
        )
        for sequences in (10, 16)
    )
    (told,) = (choice.reason for choice in few.plan.reasons if choice.setting == "micro-batch")
    assert told.endswith("They are all of the data, fewer than the 16 that a step was to have")
    assert not any("all of the data" in choice.reason for choice in enough.plan.reasons)
