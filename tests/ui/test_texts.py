"""Every language says the same things, and the form has words for every setting there is."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from ui import texts
from ui.estimate import _setting as label_of
from ui.form import GROUPS, field_specs
from ui.texts import en, preferred, texts_of, zh
from vramfit import sentences_zh
from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.hardware.catalogue import machine_with
from vramfit.models.catalogue import architecture_of
from vramfit.planning.abilities import DESIGNED, FEATURES
from vramfit.planning.plan import MEMORY_KINDS, Workload
from vramfit.planning.planner import forecast_run
from vramfit.sentences import ENGLISH, PHASES, WAYS

UI = Path(texts.__file__).parent.parent


@pytest.mark.parametrize("table", ["FIELDS", "VALUES", "GROUPS", "WORDS"])
def test_chinese_has_exactly_the_english_keys(table: str) -> None:
    assert getattr(zh, table).keys() == getattr(en, table).keys()


def test_placeholders_agree() -> None:
    def names(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    wrong = [key for key, text in en.WORDS.items() if names(text) != names(zh.WORDS[key])]
    assert wrong == []


def test_every_sentence_of_plans_and_ends_is_said_in_chinese_with_its_numbers() -> None:
    def names(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name}

    assert sentences_zh.SENTENCES.keys() == ENGLISH.keys()
    assert sentences_zh.PHASES.keys() == PHASES.keys()
    assert sentences_zh.WAYS.keys() == WAYS.keys()
    assert [key for key, text in ENGLISH.items() if names(text) != names(sentences_zh.SENTENCES[key])] == []


def test_a_plan_s_reasons_are_chinese_in_chinese() -> None:
    config = RunConfig.parse({"method": "pretrain", "model": {"source": "Qwen/Qwen3-1.7B"}})
    work = Workload(sequences=100, mean_tokens=500, longest_tokens=900)
    machine = machine_with("RTX 3060", count=2)
    large = RunConfig.parse({"method": "pretrain", "model": {"source": "Qwen/Qwen3-14B"}})
    with pytest.raises(WontFit) as caught:
        forecast_run(large, architecture=architecture_of(large.model), machine=machine, workload=work)
    forecast = forecast_run(
        config, architecture=architecture_of(config.model), machine=machine, workload=work, abilities=DESIGNED
    )
    said = [choice.reason for choice in forecast.plan.reasons] + [other.reason for other in forecast.alternatives]
    said += [other.reason for other in caught.value.forecast.alternatives]  # type: ignore[union-attr]
    english, chinese = texts_of("en"), texts_of("zh")
    assert [english.said(text) for text in said] == said
    assert all(re.search("[\u4e00-\u9fff]", chinese.said(text)) for text in said)
    lacking = {what for other in forecast.alternatives for what in other.needs}
    assert lacking
    assert lacking <= sentences_zh.LACKING.keys()


def test_all_that_an_engine_may_lack_has_chinese_words() -> None:
    assert set(FEATURES.values()) <= sentences_zh.LACKING.keys()


def test_every_setting_choice_group_and_memory_kind_has_words() -> None:
    for spec in field_specs():
        label, help_text = en.FIELDS[spec.path]
        assert label
        assert help_text.endswith((".", "story")), spec.path
        assert spec.group in GROUPS
    assert set(GROUPS) == en.GROUPS.keys()
    assert {f"part.{kind}" for kind in MEMORY_KINDS} <= en.WORDS.keys()


def test_every_setting_of_a_plan_has_a_chinese_label() -> None:
    """A label made of the name alone would be English."""
    source = "".join(path.read_text(encoding="utf-8") for path in (UI.parent / "vramfit" / "planning").glob("*.py"))
    settings = set(re.findall(r'setting="([^"]+)"', source))
    assert {"memory budget", "checkpoints"} < settings
    assert [name for name in settings if label_of(name, texts_of("zh")).isascii()] == []


def test_no_setting_is_described_that_does_not_exist() -> None:
    assert en.FIELDS.keys() == {spec.path for spec in field_specs()}


def test_every_word_that_the_code_asks_for_exists() -> None:
    """Literal keys only; computed ones (states, phases, parts) are tested where they are made."""
    asked = set()
    for path in UI.glob("*.py"):
        asked |= set(re.findall(r'(?:texts|words|start)\["([a-z_.]+)"\]', path.read_text(encoding="utf-8")))
    for path in (UI / "assets").glob("*.js"):
        asked |= set(re.findall(r'VF\.word\("([a-z_.]+)"', path.read_text(encoding="utf-8")))
    assert len(asked) > 50
    assert asked - en.WORDS.keys() == set()


def test_every_state_and_phase_of_a_run_has_a_word() -> None:
    from typing import get_args, get_type_hints

    from jobs.job import State
    from vramfit.training.metrics import PhaseProgress

    assert {f"state.{state}" for state in get_args(State)} <= en.WORDS.keys()
    assert {f"run.{name}" for name in get_args(get_type_hints(PhaseProgress)["name"])} <= en.WORDS.keys()


@pytest.mark.parametrize(
    ("header", "language"),
    [
        ("zh-CN,zh;q=0.9,en;q=0.8", "zh"),
        ("de-DE,de;q=0.9", "en"),
        ("fr, zh;q=0.5, en;q=0.7", "en"),
        ("", "en"),
        ("zh;q=rubbish, en", "en"),
    ],
)
def test_the_browsers_language_is_followed(header: str, language: str) -> None:
    assert preferred(header) == language


def test_an_unknown_language_is_english() -> None:
    assert texts_of("xx").language == "en"
