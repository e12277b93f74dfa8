"""Reading a story back: which of its sentences the grammar could have said, and whether they agree with each other.

This is how a trained starter is judged by more than its loss. A line that fits gives facts (Mia is a she; the owl helps
with heights); facts of all lines are intersected, and one that nothing is left of is a contradiction.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vramfit.starter.lines import LINES, PHASES, Line
from vramfit.starter.words import SLOTS

Facts = dict[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What reading found: `understood` of `sentences`, the phases in the order they came, and facts that disagree."""

    sentences: int
    understood: int
    phases: tuple[str, ...]
    contradicted: frozenset[str]

    @property
    def whole(self) -> bool:
        """A complete story: every sentence understood, nothing contradicted, each phase once and in order."""
        places = [PHASES.index(phase) for phase in self.phases]
        needed = set(PHASES) - {"kindness", "thanks"}
        return (
            self.understood == self.sentences
            and not self.contradicted
            and needed <= set(self.phases)
            and places == sorted(set(places))
        )


def read(text: str) -> Reading:
    """Read a whole story. What no line fits is skipped, sentence by sentence."""
    understood, phases, known, contradicted = 0, [], Facts(), set[str]()
    for line, match in _lines(text):
        understood += _count_sentences(match.group(0))
        phases.append(line.phase)
        for facts in _facts(line, match.groupdict()):
            contradicted |= _agree(known, facts)
    return Reading(
        sentences=_count_sentences(text),
        understood=understood,
        phases=tuple(phases),
        contradicted=frozenset(contradicted),
    )


def _lines(text: str) -> Iterator[tuple[Line, re.Match[str]]]:
    """The lines of the grammar in the text, the longest that fits; sentences that fit none are passed over."""
    at = 0
    while at < len(text):
        fits = [(match, line) for pattern, line in _patterns() if (match := pattern.match(text, at))]
        if fits:
            match, line = max(fits, key=lambda fit: fit[0].end())
            yield line, match
            at = match.end()
        else:
            end = _SENTENCE_END.search(text, at)
            at = end.end() if end else len(text)


_SENTENCE_END = re.compile(r'[.?!]"?(?=\s|$)\s*')


def _count_sentences(text: str) -> int:
    """Sentences by their ends; a last one without an end counts too."""
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(rest.strip())


def _agree(known: Facts, facts: Mapping[str, frozenset[str]]) -> set[str]:
    """Add facts to the known ones; the names of those that disagree."""
    against = set()
    for name, allowed in facts.items():
        both = known.get(name, allowed) & allowed
        if both:
            known[name] = both
        else:
            against.add(name)
    return against


def _facts(line: Line, said: Mapping[str, str]) -> Iterator[Mapping[str, frozenset[str]]]:
    """What a line that was said tells: its demands, the values of its slots and what those imply."""
    yield line.demands
    for slot, value in said.items():
        if slot not in _PRONOUN_SLOTS:
            yield {slot: frozenset((value,))}
        yield SLOTS[slot][value]


_PRONOUN_SLOTS = frozenset(("she", "She", "her", "Her", "him", "rel_she", "rel_him"))
_SLOT = re.compile(r"\{(\w+)\}")


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Line], ...]:
    """Each line as a pattern that also takes the space after it."""
    return tuple((re.compile(_pattern(line.text) + r"(?:\s+|$)"), line) for line in LINES)


def _pattern(text: str) -> str:
    seen, parts, at = set[str](), [], 0
    for slot in _SLOT.finditer(text):
        parts.append(re.escape(text[at : slot.start()]))
        name = slot.group(1)
        values = "|".join(re.escape(value) for value in sorted(SLOTS[name], key=len, reverse=True))
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{values})")
        seen.add(name)
        at = slot.end()
    return "".join([*parts, re.escape(text[at:])])
