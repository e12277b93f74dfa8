"""What the panel says, in each language: one module of plain tables per language, the same keys in each (tested)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ui.texts import en, zh
from vramfit.sentences import Sentence, Value

LANGUAGES: Final = {"en": en, "zh": zh}
_OF_BLOCK: Final = " of block "
"""Between a phase and the block it is about, in the planner's names."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """One language. `fields` maps a setting's dotted path to (label, help); `values` names the choices of a setting.
    `sentences` are the planner's by name, `lacking` what a version lacks."""

    language: str
    fields: dict[str, tuple[str, str]]
    values: dict[str, str]
    groups: dict[str, str]
    words: dict[str, str]
    sentences: Mapping[str, str]
    lacking: Mapping[str, str]

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
        """A sentence of the planner in this language; any other text as it is."""
        if not isinstance(text, Sentence) or text.key not in self.sentences:
            return text
        return self.sentences[text.key].format(**{name: self._value(name, of) for name, of in text.values.items()})

    def lacks(self, needs: Iterable[str]) -> str:
        """What a version lacks, as a list in words."""
        return self["list.comma"].join(self.lacking.get(what, what) for what in needs)

    def phase(self, name: str) -> str:
        """A phase of a step; those of backward carry their block's number, from 1."""
        start, _, block = name.partition(_OF_BLOCK)
        if block:
            return self["phase.block"].format(phase=self.phase(start), number=block)
        return self.words.get(f"phase.{name}", name)

    def _value(self, name: str, value: Value) -> str | int:
        if isinstance(value, tuple):
            return self.lacks(value)
        if name == "phase":
            return self.phase(str(value))
        if name == "way":
            return self.words.get(f"way.{value}", str(value))
        return self.said(value) if isinstance(value, str) else value


def texts_of(language: str) -> Texts:
    """The texts of "en" or "zh"; English for any other."""
    module = LANGUAGES.get(language, en)
    return Texts(
        language=module.LANGUAGE,
        fields=module.FIELDS,
        values=module.VALUES,
        groups=module.GROUPS,
        words=module.WORDS,
        sentences=module.SENTENCES,
        lacking=module.LACKING,
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
