"""Speech: what vramfit/sentences.py says, in one of the languages. For the pages, and for alerts that leave them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from vramfit import sentences, sentences_zh
from vramfit.sentences import ENDED, JOINED, STOPS, Sentence, Value

_OF_BLOCK: Final = " of block "
"""Between a phase and the block it is about, in the planner's names."""


@dataclass(frozen=True, kw_only=True)
class Speech:
    """One language. `sentences` by name, `lacking` what a version lacks, `phases` of a step and `ways` to run a model;
    between the parts of a list stands `comma`, between sentences `space`, behind the last word `stop`."""

    sentences: Mapping[str, str]
    lacking: Mapping[str, str]
    phases: Mapping[str, str]
    ways: Mapping[str, str]
    comma: str
    space: str
    stop: str

    def said(self, text: str) -> str:
        """A sentence in this language; any other text as it is."""
        if not isinstance(text, Sentence):
            return text
        if text.key == JOINED:
            return self.space.join(map(self.said, _parts(text.values["parts"])))
        if text.key == ENDED:
            of = text.values["said"]
            said = self.said(of) if isinstance(of, str) else str(of)
            return said if said.endswith(STOPS) else said + self.stop
        if text.key not in self.sentences:
            return text
        return self.sentences[text.key].format(**{name: self._value(name, of) for name, of in text.values.items()})

    def lacks(self, needs: Iterable[str]) -> str:
        """What a version lacks, as a list in words."""
        return self.comma.join(self.lacking.get(what, what) for what in needs)

    def phase(self, name: str) -> str:
        """A phase of a step; those of backward carry their block's number, from 1."""
        start, _, block = name.partition(_OF_BLOCK)
        if block:
            return self.phases["block"].format(phase=self.phase(start), number=block)
        return self.phases.get(name, name)

    def _value(self, name: str, value: Value) -> str | int:
        if isinstance(value, tuple):
            return self.lacks(value)
        if name == "phase":
            return self.phase(str(value))
        if name == "way":
            return self.ways.get(str(value), str(value))
        return self.said(value) if isinstance(value, str) else value


def _parts(value: Value) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


ENGLISH: Final = Speech(
    sentences=sentences.ENGLISH,
    lacking={},  # said in English already
    phases=sentences.PHASES,
    ways=sentences.WAYS,
    comma=", ",
    space=" ",
    stop=".",
)
CHINESE: Final = Speech(
    sentences=sentences_zh.SENTENCES,
    lacking=sentences_zh.LACKING,
    phases=sentences_zh.PHASES,
    ways=sentences_zh.WAYS,
    comma="、",
    space="",
    stop="。",
)


def speech_of(language: str) -> Speech:
    """The speech of "en" or "zh"; English for any other."""
    return CHINESE if language == "zh" else ENGLISH
