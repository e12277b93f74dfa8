"""RunConfig: exact round trips, every problem at once, nothing silently accepted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.config import MAX_FILE_BYTES, RunConfig
from vramfit.errors import ConfigError

FULL: dict[str, Any] = {
    "name": "Größe 大",
    "method": "lora",
    "device": "cuda:1",
    "seed": 7,
    "model": {"source": "/a b/model"},
    "data": {"paths": ["a.json", "b.json"], "columns": {"prompt": "q"}, "max_length": 512, "trained_on": "assistant"},
    "adapter": {"rank": 8, "alpha": 32, "targets": ["q_proj"]},
    "schedule": {"max_steps": 50, "learning_rate": 2e-5, "shape": "linear"},
    "memory": {"budget_gib": 11.5, "micro_batch": 2, "activations": "recompute"},
    "output": {"checkpoint_every": 5, "prompts": ["Once"], "export": "merged"},
}


def problems_of(values: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(values)
    return {problem.field: f"{problem.what} {problem.remedy}" for problem in caught.value.problems}


@pytest.mark.parametrize("values", [{}, FULL])
def test_round_trips_through_json_and_yaml(values: dict[str, Any], tmp_path: Path) -> None:
    config = RunConfig.parse(values)
    assert RunConfig.from_json(config.to_json()) == config
    file = tmp_path / "run.yaml"
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.from_file(file) == config


@given(
    steps=st.integers(1, 10**8),
    rate=st.floats(1e-9, 10),
    share=st.floats(0, 0.5),
    name=st.text(max_size=120),
    prompts=st.lists(st.text(max_size=40), max_size=3),
)
def test_any_valid_config_round_trips(steps: int, rate: float, share: float, name: str, prompts: list[str]) -> None:
    config = RunConfig.parse(
        {
            "name": name,
            "schedule": {"max_steps": steps, "learning_rate": rate},
            "data": {"eval_share": share},
            "output": {"prompts": prompts},
        }
    )
    assert RunConfig.from_json(config.to_json()) == config


def test_a_byte_order_mark_in_the_file_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xef\xbb\xbfseed: 3\n")
    assert RunConfig.from_file(file).seed == 3


def test_all_problems_are_reported_together() -> None:
    found = problems_of(
        {"seed": -1, "schedule": {"learning_rate": 0, "epochs": "many"}, "memory": {"micro_batch": 0}, "colour": 1}
    )
    assert set(found) == {"seed", "schedule.learning_rate", "schedule.epochs", "memory.micro_batch", "colour"}
    assert found["memory.micro_batch"] == "memory.micro_batch is 0, the least is 1 Use 1 or more."


@pytest.mark.parametrize(("text", "rate"), [("2e-5", 2e-5), ("'2e-5'", 2e-5), ("2.0e-5", 2e-5), ("0.00002", 2e-5)])
def test_case_101_learning_rate_as_people_write_it(tmp_path: Path, text: str, rate: float) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"schedule:\n  learning_rate: {text}\n", encoding="utf-8")
    assert RunConfig.from_file(file).schedule.learning_rate == rate


@pytest.mark.parametrize("text", ["'1,5e-4'", "''", "nan", ".nan", ".inf", "true"])
def test_case_101_a_rate_that_is_no_number_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"schedule:\n  learning_rate: {text}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"schedule\.learning_rate"):
        RunConfig.from_file(file)


UUID = "GPU-5e1f0c1a-9d3b-4c7e-8a21-0d6f2b7c9e44"


@pytest.mark.parametrize(
    "device",
    [0, "0", UUID, "", " ", None, "cuda", "gpu:1", "cuda:x", "cuda:00", "cuda:01", "cuda:\u0663", "CUDA:0", " cuda:0"],
)
def test_case_156_devices_have_one_written_form(device: object) -> None:
    """Whatever else means the same card is refused, with the form that is right."""
    told = problems_of({"device": device})["device"]
    assert "names no device" in told and "such as cuda:0" in told


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda:0", "cuda:10", "xpu:1"])
def test_case_156_the_form_is_kept_as_it_is(device: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"device: {device}\n", encoding="utf-8")
    config = RunConfig.from_file(file)
    assert config.device == RunConfig.from_json(config.to_json()).device == device


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"method": "lora"}, "method"),
        ({"method": "full", "model": {"source": "m"}, "output": {"export": "merged"}}, "output.export"),
        ({"output": {"export": "adapter"}}, "output.export"),
        ({"data": {"paths": ["starter:poems"]}}, "data.paths"),
        ({"data": {"paths": []}}, "data.paths"),
    ],
)
def test_contradictions_between_fields_are_named(values: dict[str, Any], field: str) -> None:
    assert field in problems_of(values)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [1, 2\n", "line 2"),
        (b"just text", "no settings"),
        (b"", "no settings"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"- 1\n- 2\n", "no settings"),
    ],
)
def test_a_file_that_is_no_config_says_so(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_file(file)


def test_a_missing_file_and_a_folder_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        RunConfig.from_file(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="is no file"):
        RunConfig.from_file(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_file(tmp_path / ("x" * 300))
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.from_file(Path("a\0b"))


def test_a_data_file_or_pipe_is_not_read_as_settings(tmp_path: Path) -> None:
    big = tmp_path / "rows.jsonl"
    big.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="1,048,577 bytes, the most for settings is 1,048,576"):
        RunConfig.from_file(big)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
        with pytest.raises(ConfigError, match="is no file"):
            RunConfig.from_file(tmp_path / "pipe")


def test_a_billion_values_behind_a_few_anchors_end_at_once(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    layers = "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9))
    file.write_text("a: &a [1]\n" + layers, encoding="utf-8")
    with pytest.raises(ConfigError, match="j is not a setting") as caught:
        RunConfig.from_file(file)
    assert len(str(caught.value)) < 1000


def test_problems_are_told_in_our_words_and_name_the_setting_once() -> None:
    found = problems_of({"memory": 3, "name": 5, "data": {"paths": "x"}, 7: 1, "seed": 10**5000})
    assert "memory is 3, which holds no settings" in found["memory"]
    assert "name is 5, which is not text" in found["name"]
    assert "data.paths is 'x', which is not a list" in found["data.paths"]
    assert "7 is not a setting" in found["7"]
    assert "more than 4,300 digits" in found["seed"]
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse({"memory": 3})
    assert str(caught.value).startswith("memory is 3")


@pytest.mark.parametrize("path", ["", "  "])
def test_case_137_an_empty_path_is_not_this_folder(path: str) -> None:
    assert "empty path" in problems_of({"data": {"paths": ["a.json", path]}})["data.paths"]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 1  # type: ignore[misc]


def test_a_newer_version_is_refused() -> None:
    assert "version" in problems_of({"version": 2})


def test_alpha_is_twice_the_rank_unless_given() -> None:
    base = {"method": "lora", "model": {"source": "m"}}
    assert RunConfig.parse(base | {"adapter": {"rank": 8}}).lora_alpha == 16
    assert RunConfig.parse(base | {"adapter": {"rank": 8, "alpha": 4}}).lora_alpha == 4


def test_what_another_version_wrote_is_read_as_far_as_it_is_understood() -> None:
    written = json.dumps(
        {
            "version": 2,
            "method": "lora",
            "model": {"source": "a-model", "colour": "blue"},
            "schedule": {"epochs": 3, "learning_rate": "fast"},
            "memory": "plenty",
            "later": {"deep": [1]},
        }
    )
    config, error = RunConfig.from_stored(written)
    assert (config.method, config.model.source, config.schedule.epochs) == ("lora", "a-model", 3)
    assert config.schedule.learning_rate == "auto" and config.memory == RunConfig().memory and config.version == 1
    assert error is not None and "later" in str(error) and "memory" in str(error)


def test_settings_that_contradict_each_other_by_now_are_read_and_told() -> None:
    written = RunConfig(output={"keep_best": True, "evaluate_every": 0}).to_json()
    config, error = RunConfig.from_stored(written)
    assert config.output.keep_best and config.output.evaluate_every == 0
    assert error is not None and "output.keep_best" in str(error)


@pytest.mark.parametrize("written", ["", "{", "[1]", '"text"', "3", "null", "[" * 100_000])
def test_what_is_no_config_at_all_is_the_defaults_and_told(written: str) -> None:
    config, error = RunConfig.from_stored(written)
    assert config == RunConfig() and error is not None


def test_what_this_version_wrote_is_read_as_it_is() -> None:
    config = RunConfig(name="mine", method="full", model={"source": "a-model"})
    assert RunConfig.from_stored(config.to_json()) == (config, None)


def test_a_choice_that_looks_like_a_number_or_a_no_is_the_choice() -> None:
    parsed = RunConfig.parse({"memory": {"optimizer_bits": 8, "compile": False}}).memory
    assert (parsed.optimizer_bits, parsed.compile) == ("8", "off")
    for values in ({"optimizer_bits": 7}, {"optimizer_bits": 10**5000}, {"compile": True}, {"micro_batch": False}):
        with pytest.raises(ConfigError, match=f"memory.{next(iter(values))}"):
            RunConfig.parse({"memory": values})
