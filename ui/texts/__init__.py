"""What the panel says, in each language: one module of plain tables per language, the same keys in each (tested)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ui.texts import en, zh
from vramfit.speech import Speech, speech_of

LANGUAGES: Final = {"en": en, "zh": zh}


@dataclass(frozen=True, kw_only=True)
class Texts:
    """One language. `fields` maps a setting's dotted path to (label, help); `values` names the choices of a setting.
    `speech` says what the planner and ended runs have to say."""

    language: str
    fields: dict[str, tuple[str, str]]
    values: dict[str, str]
    groups: dict[str, str]
    words: dict[str, str]
    speech: Speech

    def __getitem__(self, key: str) -> str:
        return self.words[key]

    def label(self, path: str) -> str:
        return self.fields[path][0] if path in self.fields else path

    def help(self, path: str) -> str:
        return self.fields[path][1] if path in self.fields else ""

    def value(self, path: str, value: str) -> str:
        """The shown name of a choice: the setting's own one, else the one all settings share, else the value itself."""
        return self.values.get(f"{path}={value}", self.values.get(value, value))

    def said(self, text: str) -> str:
        """A sentence of the planner, or of how a run ended, in this language; any other text as it is."""
        return self.speech.said(text)

    def lacks(self, needs: Iterable[str]) -> str:
        """What a version lacks, as a list in words."""
        return self.speech.lacks(needs)

    def phase(self, name: str) -> str:
        """A phase of a step; those of backward carry their block's number, from 1."""
        return self.speech.phase(name)


def texts_of(language: str) -> Texts:
    """The texts of "en" or "zh"; English for any other."""
    module = LANGUAGES.get(language, en)
    speech = speech_of(module.LANGUAGE)
    return Texts(
        language=module.LANGUAGE,
        fields=module.FIELDS,
        values=module.VALUES,
        groups=module.GROUPS,
        words={**module.WORDS, **{f"way.{name}": word for name, word in speech.ways.items()}},
        speech=speech,
    )


def preferred(accept_language: str) -> str:
    """The best of our languages for a browser's Accept-Language header: `zh-CN,zh;q=0.9,en;q=0.8` -> "zh"."""
    wishes = []
    for position, part in enumerate(accept_language.split(",")):
        tag, _, quality = part.strip().partition(";q=")
        try:
            weight = float(quality) if quality else 1.0
        except ValueError:
            weight = 0.0
        wishes.append((-weight, position, tag.split("-")[0].lower()))
    return next((tag for _, _, tag in sorted(wishes) if tag in LANGUAGES), "en")
