"""The words of the story grammar: who, where, what, and which of them go together.

`SLOTS[slot][value]` gives what a value implies about other facts of the story, as sets of allowed values: the bell can
lie in water or in the dark, the owl helps with heights, Mia is a she. Writing a story picks values that agree; reading
one back (`reading.py`) intersects the same sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Allowed = Mapping[str, frozenset[str]]

SHE_NAMES = ("Mia", "Lena", "Rosa", "Nora", "Ella", "Ida", "Clara", "Maya", "Zoe", "Lily", "Anna", "Suki")
HE_NAMES = ("Tom", "Ben", "Max", "Leo", "Finn", "Noah", "Emil", "Hugo", "Jonas", "Ravi", "Omar", "Kenji")

PRONOUNS = {
    "she": {"she": "she", "She": "She", "her": "her", "Her": "Her", "him": "her"},
    "he": {"she": "he", "She": "He", "her": "his", "Her": "His", "him": "him"},
}
"""The hero's pronouns by slot; the slot is named by the feminine form (`him` is the object form)."""

KINDS = (
    "fox",
    "bear",
    "rabbit",
    "hedgehog",
    "goat",
    "mouse",
    "squirrel",
    "badger",
)
"""What a hero can be beside a girl or a boy. None of them is a helper, so no one is helped by their own kind."""

TRAITS = (
    "shy",
    "proud",
    "hasty",
    "stubborn",
    "lonely",
    "curious",
    "cheerful",
    "gentle",
    "brave",
    "dreamy",
    "grumpy",
    "forgetful",
)

HOMES = {
    "in a small village by the sea": "the village",
    "in a cottage at the edge of the forest": "the cottage",
    "in a white house on a green hill": "the white house",
    "in an old mill by the river": "the mill",
    "in a quiet valley between two mountains": "the valley",
    "on a farm with a red roof": "the farm",
    "in a little town with crooked streets": "the town",
    "in a garden full of roses": "the garden",
    "on a boat at the end of the harbour": "the boat",
    "in a wooden hut near the lake": "the hut",
    "on an island with three trees": "the island",
    "in a lighthouse above the bay": "the lighthouse",
}
"""Where a hero lives, and what that place is called afterwards."""

RELATIVES = {
    "grandmother": "she",
    "grandfather": "he",
    "mother": "she",
    "father": "he",
    "sister": "she",
    "brother": "he",
    "aunt": "she",
    "uncle": "he",
}

OCCASIONS = ("ill", "birthday", "sad")
NEEDS = ("hungry", "thirsty", "cold", "lonely", "lost", "caught")
WISHES = ("lost", "gift", "make", "learn", "visit")
MODES = ("ask", "kind")
"""How help comes: the hero is asked what is wrong, or was kind to the helper before."""

EVENTS = ("summer feast", "spring dance", "harvest fair", "winter market")

PLACES = {
    "high": ("at the top of the tall pine", "on the roof of the old barn", "on the highest branch of the oak"),
    "water": ("at the bottom of the pond", "at the bottom of the old well", "at the bottom of the deep canal"),
    "dark": ("in the dark cave", "in the cellar of the old castle", "deep inside the gloomy tunnel"),
    "narrow": ("inside a hollow log", "in a crack in the wall", "between the roots of the old elm"),
    "heavy": ("under a fallen tree", "under a heavy stone", "behind a broken gate"),
}
"""Where a lost treasure can lie, by the obstacle that keeps the hero from it."""

TREASURES = {
    "red kite": ("high",),
    "straw hat": ("high",),
    "paper crown": ("high", "heavy"),
    "warm scarf": ("high", "heavy"),
    "blue ribbon": ("high", "narrow"),
    "silver bell": ("water", "dark"),
    "golden ring": ("water", "dark", "narrow"),
    "brass key": ("water", "dark", "narrow"),
    "silver spoon": ("water", "dark"),
    "glass marble": ("narrow", "water"),
    "wooden flute": ("narrow", "heavy"),
    "little drum": ("heavy",),
    "green lantern": ("heavy", "water"),
    "music box": ("heavy", "dark"),
}
"""What can be lost, and to which obstacles: wind takes light things, water swallows heavy ones, magpies like silver."""


@dataclass(frozen=True, kw_only=True)
class Find:
    """Something found in one place only, good as a gift, and what can be made of it."""

    thing: str
    obstacle: str
    spot: str
    product: str


FINDS = (
    Find(thing="golden apple", obstacle="high", spot="at the top of the highest apple tree", product="golden pie"),
    Find(thing="white star flower", obstacle="high", spot="on a ledge of the steep cliff", product="flower wreath"),
    Find(thing="water lily", obstacle="water", spot="in the middle of the lake", product="crown of petals"),
    Find(thing="shining pearl", obstacle="water", spot="at the bottom of the blue lagoon", product="pearl necklace"),
    Find(thing="clear crystal", obstacle="dark", spot="in the deepest cave of the mountain", product="crystal lamp"),
    Find(thing="jar of honey", obstacle="dark", spot="in the cellar of the ruined tower", product="honey cake"),
    Find(thing="piece of honeycomb", obstacle="narrow", spot="inside a hollow willow", product="tall candle"),
    Find(thing="peacock feather", obstacle="narrow", spot="behind a gap in the hedge", product="feather cap"),
    Find(thing="sweet root", obstacle="heavy", spot="under the great grey rock", product="sweet soup"),
    Find(thing="bunch of violets", obstacle="heavy", spot="behind a pile of logs", product="violet tart"),
)

HELPERS = {
    "high": ("an old owl", "a clever crow", "a white stork"),
    "water": ("a quick otter", "a green frog", "an old turtle"),
    "dark": ("a tiny firefly", "a wise bat", "a friendly glowworm"),
    "narrow": ("a thin weasel", "a tiny lizard", "a busy beetle"),
    "heavy": ("a strong ox", "a brown horse", "a big elk"),
    "river": ("a white swan", "a kind beaver"),
    "fog": ("a wild goose", "a bright moth"),
    "snow": ("a strong reindeer", "a shaggy dog"),
    "gate": ("a cheeky magpie", "a nimble cat"),
    "swim": ("a patient duck", "a playful seal"),
    "whistle": ("a merry blackbird", "a small finch"),
    "climb": ("a lively monkey", "a spotted gecko"),
    "skate": ("a snowy hare", "a jolly penguin"),
    "dance": ("a graceful crane", "a pink flamingo"),
    "sing": ("a brown nightingale", "a yellow canary"),
}
"""Who can help with what. Each helper has one gift, so the helper follows from the obstacle."""

ROUTES = {
    "river": "on the other side of the wild river",
    "fog": "beyond the misty moor",
    "snow": "behind the snowy mountain",
    "gate": "inside the old town wall",
}
"""Where a relative lives, and what lies between."""

SKILLS = {
    "swim": "at the pond",
    "whistle": "in the meadow",
    "climb": "under the old chestnut tree",
    "skate": "on the frozen lake",
    "dance": "in the market square",
    "sing": "behind the rose hedge",
}
"""What a hero can want to learn, and where it is tried."""


def bare(helper: str) -> str:
    """`an old owl` -> `owl`."""
    return helper.rsplit(" ", 1)[1]


def _one(**facts: str) -> Allowed:
    return {fact: frozenset((value,)) for fact, value in facts.items()}


def _heroes() -> dict[str, dict[str, Allowed]]:
    names = {"she": SHE_NAMES, "he": HE_NAMES}
    slots: dict[str, dict[str, Allowed]] = {
        "name": {name: _one(hero=hero) for hero, group in names.items() for name in group}
    }
    for slot in ("she", "She", "her", "Her", "him"):
        slots[slot] = {forms[slot]: _one(hero=hero) for hero, forms in PRONOUNS.items()}
    slots["kind"] = {"girl": _one(hero="she"), "boy": _one(hero="he")} | {kind: {} for kind in KINDS}
    slots["relative"] = {relative: _one(rel=rel) for relative, rel in RELATIVES.items()}
    slots["rel_she"] = {"she": _one(rel="she"), "he": _one(rel="he")}
    slots["rel_him"] = {"her": _one(rel="she"), "him": _one(rel="he")}
    return slots


def _things() -> tuple[dict[str, Allowed], dict[str, Allowed], dict[str, Allowed]]:
    """What each thing, spot and product implies."""
    things: dict[str, Allowed] = {
        thing: {"wish": frozenset(("lost",)), "obstacle": frozenset(obstacles)}
        for thing, obstacles in TREASURES.items()
    }
    spots: dict[str, Allowed] = {
        spot: _one(wish="lost", obstacle=obstacle) for obstacle, group in PLACES.items() for spot in group
    }
    found = frozenset(("gift", "make"))
    for find in FINDS:
        things[find.thing] = {"wish": found, **_one(obstacle=find.obstacle, spot=find.spot, product=find.product)}
        spots[find.spot] = {"wish": found, **_one(obstacle=find.obstacle, thing=find.thing)}
    spots |= {spot: _one(wish="visit", obstacle=obstacle) for obstacle, spot in ROUTES.items()}
    spots |= {spot: _one(wish="learn", obstacle=skill) for skill, spot in SKILLS.items()}
    products = {find.product: _one(wish="make", thing=find.thing) for find in FINDS}
    return things, spots, products


def _slots() -> dict[str, dict[str, Allowed]]:
    slots = _heroes()
    slots["thing"], slots["spot"], slots["product"] = _things()
    slots["trait"] = {trait: {} for trait in TRAITS}
    slots["home"] = {home: _one(back=back) for home, back in HOMES.items()}
    slots["back"] = {back: _one(home=home) for home, back in HOMES.items()}
    slots["event"] = {event: _one(wish="make") for event in EVENTS}
    slots["skill"] = {skill: _one(wish="learn", obstacle=skill) for skill in SKILLS}
    helpers = [(helper, obstacle) for obstacle, group in HELPERS.items() for helper in group]
    slots["a_helper"] = {helper: _one(obstacle=obstacle, helper=bare(helper)) for helper, obstacle in helpers}
    slots["helper"] = {bare(helper): _one(obstacle=obstacle, a_helper=helper) for helper, obstacle in helpers}
    return slots


SLOTS: Mapping[str, Mapping[str, Allowed]] = _slots()
