"""Stories from the grammar: someone wants something, fails alone, is helped, and is changed by it.

Deterministic by seed on every Python version: the only source of chance is `random.Random(seed).random()`, whose
sequence Python promises to keep, and nothing is ordered by a hash.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vramfit.starter import words
from vramfit.starter.lines import LINES, PHASES, Line

T = TypeVar("T")


class Chance:
    """A stream of choices. `bits` counts the information of all choices made so far."""

    def __init__(self, seed: int) -> None:
        self._random: Callable[[], float] = random.Random(seed).random
        self.bits = 0.0

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        self.bits += _BITS[len(options)]
        return options[int(self._random() * len(options))]


_BITS = (0.0, *(math.log2(count) for count in range(1, 1000)))


@dataclass(frozen=True, kw_only=True)
class Story:
    """A story with the facts behind it: `name`, `kind`, `trait`, `wish`, `thing`, `spot`, `helper`, ... by slot."""

    facts: dict[str, str]
    text: str


def stories(seed: int, count: int) -> Iterator[Story]:
    """`count` stories; the first n of a longer series are the series of n."""
    chance = Chance(seed)
    for _ in range(count):
        yield tell(chance)


def tell(chance: Chance) -> Story:
    """One story: first the facts, then a line for each phase that the facts allow."""
    facts = imagine(chance)
    lines = [chance.pick(options) for phase in PHASES if (options := fitting(phase, facts))]
    return Story(facts=facts, text=" ".join([line.text.format_map(facts) for line in lines]))


def imagine(chance: Chance) -> dict[str, str]:
    """The facts of a new story, all in agreement."""
    hero = chance.pick(("she", "he"))
    home = chance.pick(_HOMES)
    facts = {
        "hero": hero,
        **words.PRONOUNS[hero],
        "name": chance.pick(words.SHE_NAMES if hero == "she" else words.HE_NAMES),
        "kind": chance.pick(_KINDS[hero]),
        "trait": chance.pick(words.TRAITS),
        "home": home,
        "back": words.HOMES[home],
        "wish": chance.pick(words.WISHES),
        "mode": chance.pick(words.MODES),
    }
    # Only what the story will tell is drawn, so that `bits` is the information a reader gets.
    if facts["mode"] == "kind":
        facts["need"] = chance.pick(words.NEEDS)
    if facts["wish"] in ("gift", "visit"):
        facts["occasion"] = chance.pick(words.OCCASIONS)
    if facts["wish"] == "make":
        facts["event"] = chance.pick(words.EVENTS)
    else:
        _imagine_relative(facts, chance)
    _imagine_goal(facts, chance)
    facts["a_helper"] = chance.pick(words.HELPERS[facts["obstacle"]])
    facts["helper"] = words.bare(facts["a_helper"])
    return facts


_HOMES = tuple(words.HOMES)
_KINDS = {"she": ("girl", "girl", *words.KINDS), "he": ("boy", "boy", *words.KINDS)}
_RELATIVES = tuple(words.RELATIVES)
_TREASURES = tuple(words.TREASURES)
_SKILLS = tuple(words.SKILLS)
_ROUTES = tuple(words.ROUTES)


def _imagine_relative(facts: dict[str, str], chance: Chance) -> None:
    relative = chance.pick(_RELATIVES)
    rel = words.RELATIVES[relative]
    facts |= {"relative": relative, "rel": rel, "rel_she": rel, "rel_him": words.PRONOUNS[rel]["him"]}


def _imagine_goal(facts: dict[str, str], chance: Chance) -> None:
    """What is wanted, where it is, and what kind of obstacle that means."""
    wish = facts["wish"]
    if wish == "lost":
        thing = chance.pick(_TREASURES)
        obstacle = chance.pick(words.TREASURES[thing])
        facts |= {"thing": thing, "obstacle": obstacle, "spot": chance.pick(words.PLACES[obstacle])}
    elif wish == "learn":
        skill = chance.pick(_SKILLS)
        facts |= {"skill": skill, "obstacle": skill, "spot": words.SKILLS[skill]}
    elif wish == "visit":
        route = chance.pick(_ROUTES)
        facts |= {"obstacle": route, "spot": words.ROUTES[route]}
    else:
        find = chance.pick(words.FINDS)
        facts |= {"thing": find.thing, "obstacle": find.obstacle, "spot": find.spot, "product": find.product}


_BY_PHASE = {phase: [line for line in LINES if line.phase == phase] for phase in PHASES}
_DEMANDED = {
    phase: tuple(sorted({fact for line in lines for fact in line.demands})) for phase, lines in _BY_PHASE.items()
}
_FITTING: dict[tuple[str, ...], tuple[Line, ...]] = {}


def fitting(phase: str, facts: dict[str, str]) -> tuple[Line, ...]:
    """The lines of a phase that the facts allow; none where the phase belongs to the other mode."""
    key = (phase, *[facts.get(fact, "") for fact in _DEMANDED[phase]])
    found = _FITTING.get(key)
    if found is None:
        found = tuple(
            line
            for line in _BY_PHASE[phase]
            if all(facts.get(fact) in allowed for fact, allowed in line.demands.items())
        )
        _FITTING[key] = found
    return found
