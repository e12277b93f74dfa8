"""Widgets <-> RunConfig: nothing lost on the way there and back, every problem at its field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ui import form
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import ConfigError

EN, ZH = texts_of("en"), texts_of("zh")


def _leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in values.items():
        nested = isinstance(value, dict) and name != "columns"
        found |= _leaves(value, f"{prefix}{name}.") if nested else {prefix + name}
    return found


def test_every_setting_of_a_run_is_in_the_form() -> None:
    settings = _leaves(RunConfig().model_dump(mode="json"))
    assert {spec.path for spec in form.field_specs()} == settings - set(form.HIDDEN)


def test_the_simple_mode_shows_about_eight_fields_that_exist() -> None:
    assert set(form.SIMPLE) <= {spec.path for spec in form.field_specs()}
    assert len(form.SIMPLE) <= 10


def test_the_kind_of_a_widget_follows_from_the_settings_type() -> None:
    specs = {spec.path: spec for spec in form.field_specs()}
    assert specs["data.packing"].choices == ("auto", "yes", "no")
    assert specs["method"].choices == ("pretrain", "full", "lora", "qlora")
    assert (specs["schedule.max_steps"].kind, specs["schedule.max_steps"].required) == ("number", False)
    assert (specs["seed"].kind, specs["seed"].required, specs["seed"].whole) == ("number", True, True)
    assert (specs["adapter.targets"].kind, specs["adapter.targets"].blank) == ("lines", "all-linear")
    assert specs["data.columns"].kind == "pairs"
    assert specs["data.paths"].required


configs = st.builds(
    lambda **parts: RunConfig.parse(parts),
    name=st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Z"]), max_size=20),
    method=st.just("lora"),
    seed=st.integers(0, 2**32 - 1),
    model=st.builds(dict, source=st.sampled_from(["org/model", "C:\\models\\我的", "/a b/c"])),
    data=st.builds(
        dict,
        paths=st.lists(st.sampled_from(["a.jsonl", "b c.csv", "数据.txt"]), min_size=1, max_size=3),
        columns=st.dictionaries(
            st.sampled_from(["text", "prompt"]),
            st.sampled_from(["story", "a:b", "列", " a ", '"b"', '"', "two\nlines", " "]),
        ),
        max_length=st.one_of(st.just("auto"), st.integers(8, 4096)),
        packing=st.sampled_from(["auto", True, False]),
        eval_share=st.floats(0, 0.5),
    ),
    adapter=st.builds(
        dict,
        alpha=st.one_of(st.just("auto"), st.floats(1e-6, 1e6)),
        targets=st.one_of(st.just("all-linear"), st.lists(st.sampled_from(["q_proj", "v_proj"]), min_size=1)),
    ),
    schedule=st.builds(
        dict,
        epochs=st.floats(1e-3, 10_000),
        max_steps=st.one_of(st.none(), st.integers(1, 10**8)),
        learning_rate=st.one_of(st.just("auto"), st.floats(1e-12, 10)),
    ),
    output=st.builds(dict, prompts=st.lists(st.sampled_from(["Once", "很久以前", "a: b"]), max_size=3)),
)


@given(configs)
def test_any_run_survives_the_form(config: RunConfig) -> None:
    assert form.read(form.show(config), EN) == config


def test_an_untouched_form_is_the_default_run() -> None:
    assert form.read({}, EN) == RunConfig()


def test_all_problems_come_together_each_at_its_field_in_the_readers_words() -> None:
    typed = {
        "schedule.epochs": "soon",
        "seed": "-1",
        "data.max_length": "3",
        "schedule.max_steps": "1.5",
        "adapter.rank": "",
        "data.columns": "text",
        "data.paths": " \n",
    }
    with pytest.raises(ConfigError) as caught:
        form.read(typed, EN)
    problems = {problem.field: str(problem) for problem in caught.value.problems}
    assert problems.keys() == typed.keys()
    assert problems["schedule.epochs"] == "Epochs is 'soon', which is not a number. Type a number."
    assert problems["schedule.max_steps"] == "Steps at most is 1.5, which is not a whole number. Type a whole number."
    assert problems["adapter.rank"] == "LoRA rank is empty. Give it a number."
    assert problems["seed"].startswith("Random seed ")
    assert "-1" in problems["seed"]
    assert "8" in problems["data.max_length"]


def test_problems_speak_chinese_on_the_chinese_page() -> None:
    with pytest.raises(ConfigError) as caught:
        form.read({"schedule.epochs": "soon"}, ZH)
    assert caught.value.problems[0].what == "“轮数”是 'soon'，不是数字"


def test_numbers_are_read_as_people_write_them() -> None:
    typed = {"schedule.learning_rate": " 2e-4 ", "schedule.sequences_per_step": "8.0", "data.max_length": "auto"}
    config = form.read(typed, EN)
    assert config.schedule.learning_rate == 2e-4
    assert config.schedule.sequences_per_step == 8
    assert config.data.max_length == "auto"


def test_what_fits_no_field_alone_is_still_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        form.read({"method": "lora"}, EN)
    assert caught.value.problems[0].field == "method"


def test_a_problem_inside_a_list_belongs_to_the_lists_field() -> None:
    assert form.field_of("data.paths.0") == "data.paths"
    assert form.field_of("nowhere.at.all") == ""


@pytest.mark.parametrize("text", ["1e309", "-1e309", "nan", "inf", "9" * 5000])
@pytest.mark.parametrize(
    "spec", [spec for spec in form.field_specs() if spec.kind == "number"], ids=lambda spec: spec.path
)
def test_no_number_is_infinite(spec: form.FieldSpec, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        form.read({spec.path: text}, EN)
    (problem,) = caught.value.problems
    assert problem.field == spec.path
    assert text[:50] in problem.what
    assert len(problem.what) < 150


@pytest.mark.parametrize("text", ["1e300", "-1e300", "1" + "0" * 30])
@pytest.mark.parametrize(
    "spec", [spec for spec in form.field_specs() if spec.kind == "number"], ids=lambda spec: spec.path
)
def test_every_number_has_its_limits(spec: form.FieldSpec, text: str) -> None:
    with pytest.raises(ConfigError):
        form.read({spec.path: text}, EN)


def test_a_problem_repeats_only_the_beginning_of_a_long_text() -> None:
    with pytest.raises(ConfigError) as caught:
        form.read({"seed": "x" * 100_000, "data.columns": "y" * 100_000}, EN)
    assert all(len(problem.what) < 150 for problem in caught.value.problems)
