"""The sentences of the story grammar, in the order a story tells them.

A line is a text with `{slots}` and what it demands of the story's facts: the line about jumping is said only where the
obstacle is a height. `PHASES` is the order; every phase has one line in each story, except those of the other mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One to three sentences with `{slots}`, and the facts under which they may be said."""

    phase: str
    text: str
    demands: Mapping[str, frozenset[str]]


PHASES = (
    "opening",
    "kindness",
    "wish",
    "trouble",
    "attempt",
    "sorrow",
    "help comes",
    "help",
    "joy",
    "thanks",
    "change",
)

LINES: list[Line] = []

_FIND = ("gift", "make")
_FETCH = ("lost", *_FIND)
"""The wishes for a thing that cannot be had anywhere, and for a thing at all."""


def _say(phase: str, *texts: str, **demands: str | tuple[str, ...]) -> None:
    allowed = {fact: frozenset((values,) if isinstance(values, str) else values) for fact, values in demands.items()}
    LINES.extend(Line(phase, text, allowed) for text in texts)


_say(
    "opening",
    "Once there was a {trait} {kind} named {name}. {She} lived {home}.",
    "{name} was a {trait} {kind}. {She} lived {home}.",
    "There once was a {trait} {kind} who lived {home}. {Her} name was {name}.",
    "Long ago, a {trait} {kind} named {name} lived {home}.",
)

# In the mode `kind`, the hero helps first.
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was hungry. {name} shared {her} bread with the {helper}.",
    mode="kind",
    need="hungry",
)
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was thirsty. {name} brought the {helper} some fresh water.",
    mode="kind",
    need="thirsty",
)
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was cold. {name} made a warm fire for the {helper}.",
    mode="kind",
    need="cold",
)
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was lonely. {name} stayed and told the {helper} a story.",
    mode="kind",
    need="lonely",
)
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was lost. {name} showed the {helper} the way.",
    mode="kind",
    need="lost",
)
_say(
    "kindness",
    "One morning, near {back}, {she} met {a_helper} who was caught in a net. {name} set the {helper} free.",
    mode="kind",
    need="caught",
)

# What the hero wants, and why.
_say(
    "wish",
    "{name} had a {thing}, a present from {her} {relative}, and loved it more than anything.",
    "{Her} dearest treasure was a {thing}, because it was a present from {her} {relative}.",
    "{name} never went anywhere without {her} {thing}. It was a present from {her} {relative}.",
    wish="lost",
)
_say(
    "wish",
    "One day, {her} {relative} fell ill. Only a {thing} could help, so {name} wanted to find one.",
    "{Her} {relative} was ill in bed, and {name} wanted to bring {rel_him} a {thing} to make {rel_him} well.",
    wish="gift",
    occasion="ill",
)
_say(
    "wish",
    "It was almost the birthday of {her} {relative}, and {name} wanted to give {rel_him} a {thing}.",
    "{name} wanted to find a {thing}, because the next day was the birthday of {her} {relative}.",
    wish="gift",
    occasion="birthday",
)
_say(
    "wish",
    "{Her} {relative} had been sad for days, so {name} wanted to cheer {rel_him} up with a {thing}.",
    "{name} wanted to bring {her} {relative} a {thing}, because {rel_she} had been sad for days.",
    wish="gift",
    occasion="sad",
)
_say(
    "wish",
    "Soon it was time for the {event}. {name} wanted to make a {product}, and for that {she} needed a {thing}.",
    "{name} wanted to bring a {product} to the {event}. To make it, {she} needed a {thing}.",
    wish="make",
)
_say(
    "wish",
    "All {her} friends could {skill}, and {name} wanted to {skill} too.",
    "More than anything, {name} wanted to {skill}, because all {her} friends could.",
    "{name} wanted to learn to {skill}, to make {her} {relative} proud.",
    "{Her} {relative} loved to {skill}, and {name} wanted to {skill} too.",
    wish="learn",
)
_say(
    "wish",
    "One day, {name} heard that {her} {relative} was ill, and {she} wanted to visit {rel_him}.",
    "{name} wanted to visit {her} {relative}, because {rel_she} was ill in bed.",
    wish="visit",
    occasion="ill",
)
_say(
    "wish",
    "It was the birthday of {her} {relative}, and {name} wanted to visit {rel_him}.",
    "{name} wanted to visit {her} {relative}, because it was {her} {relative}'s birthday.",
    wish="visit",
    occasion="birthday",
)
_say(
    "wish",
    "{Her} {relative} had been sad for days, so {name} wanted to visit {rel_him}.",
    "{name} wanted to visit {her} {relative}, because {rel_she} had been sad for days.",
    wish="visit",
    occasion="sad",
)

# What stands in the way, and how that came about.
_say(
    "trouble",
    "But one day, the wind blew the {thing} away, and it landed {spot}. {name} wanted it back.",
    "One windy day, the {thing} flew away. It came down {spot}, and {name} wanted it back.",
    wish="lost",
    obstacle="high",
)
_say(
    "trouble",
    "But one day, the {thing} fell into the water and sank. It lay {spot}, and {name} wanted it back.",
    "One day, {name} stumbled, and the {thing} fell into the water. Now it lay {spot}, and {name} wanted it back.",
    wish="lost",
    obstacle="water",
)
_say(
    "trouble",
    "But one night, a thief stole the {thing} and hid it {spot}. {name} wanted it back.",
    "One evening, a thief took the {thing}. It was hidden {spot}, and {name} wanted it back.",
    wish="lost",
    obstacle="dark",
)
_say(
    "trouble",
    "But one day, {name} dropped the {thing}, and it slipped away. It was stuck {spot}, and {name} wanted it back.",
    "One day, the {thing} slipped away and got stuck {spot}. {name} wanted it back.",
    wish="lost",
    obstacle="narrow",
)
_say(
    "trouble",
    "But one night, there was a great storm. In the morning, the {thing} lay {spot}, and {name} wanted it back.",
    "One night, a storm came and threw everything about. Now the {thing} lay {spot}, and {name} wanted it back.",
    wish="lost",
    obstacle="heavy",
)
_say(
    "trouble",
    "There was only one, and it was {spot}.",
    "{name} looked everywhere. At last {she} saw a {thing} {spot}.",
    wish=_FIND,
)
_say("trouble", "But {she} was afraid of the deep water.", obstacle="swim")
_say("trouble", "But nobody had ever shown {him} how to do it.", obstacle="whistle")
_say("trouble", "But {she} was afraid to fall.", obstacle="climb")
_say("trouble", "But the ice was very slippery.", obstacle="skate")
_say("trouble", "But {she} always got the steps wrong.", obstacle="dance")
_say("trouble", "But {her} voice was thin and shaky.", obstacle="sing")
_say(
    "trouble",
    "But {her} {relative} lived {spot}, and the flood had carried the bridge away.",
    "But the flood had carried the bridge away, and {her} {relative} lived {spot}.",
    obstacle="river",
)
_say(
    "trouble",
    "But {her} {relative} lived {spot}, and the fog hid every path.",
    "But the fog hid every path, and {her} {relative} lived {spot}.",
    obstacle="fog",
)
_say(
    "trouble",
    "But {her} {relative} lived {spot}, and the snow lay very deep.",
    "But the snow lay very deep, and {her} {relative} lived {spot}.",
    obstacle="snow",
)
_say(
    "trouble",
    "But {her} {relative} lived {spot}, and the gate was locked.",
    "But the gate was locked, and {her} {relative} lived {spot}.",
    obstacle="gate",
)

# The hero tries alone, and why that fails.
_say(
    "attempt",
    "{name} jumped as high as {she} could, but {she} could not reach it.",
    "{name} tried to climb up, but {she} slipped and slid down again.",
    "{name} tried with a long stick, but the stick was too short.",
    wish=_FETCH,
    obstacle="high",
)
_say(
    "attempt",
    "{name} tried with a long stick, but the water was too deep.",
    "{name} waded in, but soon the water was too deep.",
    "{name} let down a rope with a hook, but the hook caught nothing but weeds.",
    wish=_FETCH,
    obstacle="water",
)
_say(
    "attempt",
    "{name} went in a few steps, but it was so dark that {she} could not see a thing.",
    "{name} lit a candle, but a cold wind blew it out.",
    "{name} felt {her} way along the wall, but soon {she} had to turn back in the dark.",
    wish=_FETCH,
    obstacle="dark",
)
_say(
    "attempt",
    "{name} reached in, but the gap was too narrow.",
    "{name} tried with a thin twig, but the twig broke.",
    "{name} tried to squeeze through, but {she} was too big.",
    wish=_FETCH,
    obstacle="narrow",
)
_say(
    "attempt",
    "{name} pushed with all {her} might, but nothing moved.",
    "{name} pulled and pulled, but it was too heavy.",
    "{name} tried to lift the weight with a branch, but the branch broke.",
    wish=_FETCH,
    obstacle="heavy",
)
_say(
    "attempt",
    "{name} tried it {spot}, but water got into {her} nose and {she} ran out again.",
    "{name} practised {spot}, but {she} sank like a stone.",
    obstacle="swim",
)
_say(
    "attempt",
    "{name} tried it {spot}, but nothing came out but air.",
    "{name} practised {spot}, but it only sounded like a leaky kettle.",
    obstacle="whistle",
)
_say(
    "attempt",
    "{name} tried it {spot}, but {she} slid down and landed in the grass.",
    "{name} practised {spot}, but {her} knees shook too much.",
    obstacle="climb",
)
_say(
    "attempt",
    "{name} tried it {spot}, but {her} feet slid apart and {she} sat down hard.",
    "{name} practised {spot}, but {she} fell at every turn.",
    obstacle="skate",
)
_say(
    "attempt",
    "{name} tried it {spot}, but {she} tripped over {her} own feet.",
    "{name} practised {spot}, but {she} got dizzy and bumped into a cart.",
    obstacle="dance",
)
_say(
    "attempt",
    "{name} tried it {spot}, but only a squeak came out.",
    "{name} practised {spot}, but every note was wrong.",
    obstacle="sing",
)
_say(
    "attempt",
    "{name} tried to wade across, but the water was too strong.",
    "{name} built a raft, but the raft broke.",
    obstacle="river",
)
_say(
    "attempt",
    "{name} walked and walked, but {she} came back to where {she} had started.",
    "{name} followed a path, but the path ended in a swamp.",
    obstacle="fog",
)
_say(
    "attempt",
    "{name} set out, but {she} sank into the snow at every step.",
    "{name} tried to slide along on a board, but the board got stuck.",
    obstacle="snow",
)
_say(
    "attempt",
    "{name} knocked and called, but nobody heard {him}.",
    "{name} tried to climb over, but the wall was too smooth.",
    obstacle="gate",
)

# Said with the trait, so that the end of the story need not look back to its first line alone.
_say(
    "sorrow",
    "The {trait} {kind} sat down and cried.",
    "The {trait} {kind} did not know what to do.",
    "The {trait} {kind} sighed and wanted to give up.",
    "The {trait} {kind} hung {her} head and was sad.",
)

# Help comes: a stranger asks, or kindness is returned.
_say(
    "help comes",
    'Then {a_helper} came by. "Why are you sad?" asked the {helper}. "I want my {thing} back," said {name}.',
    '"What is wrong?" asked {a_helper}. "I have lost my {thing}," said {name}.',
    mode="ask",
    wish="lost",
)
_say(
    "help comes",
    'Then {a_helper} came by. "Why are you sad?" asked the {helper}. "I need the {thing}," said {name}.',
    '"What is wrong?" asked {a_helper}. "I cannot get the {thing}," said {name}.',
    mode="ask",
    wish=_FIND,
)
_say(
    "help comes",
    'Then {a_helper} came by. "Why are you sad?" asked the {helper}. "I cannot {skill}," said {name}.',
    '"What is wrong?" asked {a_helper}. "I want to {skill}, but I do not know how," said {name}.',
    mode="ask",
    wish="learn",
)
_say(
    "help comes",
    'Then {a_helper} came by. "Why are you sad?" asked the {helper}. "I want to visit my {relative}," said {name}.',
    '"What is wrong?" asked {a_helper}. "I cannot get to my {relative}," said {name}.',
    mode="ask",
    wish="visit",
)
for _need, _deed in {
    "hungry": "shared your bread with me",
    "thirsty": "brought me water",
    "cold": "made a fire for me",
    "lonely": "told me a story",
    "lost": "showed me the way",
    "caught": "set me free",
}.items():
    _say(
        "help comes",
        f'Then the {{helper}} came back. "You {_deed}," said the {{helper}}. "Now I will help you."',
        f'"You {_deed}," said the {{helper}}, who had seen it all. "Now it is my turn to help."',
        mode="kind",
        need=_need,
    )

# What helps is the helper's own gift.
_say(
    "help",
    "The {helper} flew up, took the {thing} and laid it at {her} feet.",
    "With a few beats of its wings, the {helper} was up there and brought the {thing} down.",
    wish=_FETCH,
    obstacle="high",
)
_say(
    "help",
    "The {helper} dived in and came up with the {thing}.",
    "The {helper} swam down, took the {thing} and brought it to the shore.",
    wish=_FETCH,
    obstacle="water",
)
_say(
    "help",
    "The {helper} knew the way in the dark and led {name} to the {thing}.",
    "The {helper} was not afraid of the dark. Soon it came back with the {thing}.",
    wish=_FETCH,
    obstacle="dark",
)
_say(
    "help",
    "The {helper} slipped in and pulled the {thing} out.",
    "The {helper} was just small enough. It crept in and came back with the {thing}.",
    wish=_FETCH,
    obstacle="narrow",
)
_say(
    "help",
    "The {helper} gave one great push, and there was the {thing}.",
    "The {helper} was strong enough to clear the way, and {name} picked up the {thing}.",
    wish=_FETCH,
    obstacle="heavy",
)
_say(
    "help",
    '"Breathe slowly and kick your feet," said the {helper}, and stayed close beside {him}.',
    obstacle="swim",
)
_say("help", '"Make your lips round and blow softly," said the {helper}, and showed {him}.', obstacle="whistle")
_say("help", '"Look up and never down," said the {helper}, and went first.', obstacle="climb")
_say("help", '"Bend your knees and push gently," said the {helper}, and held {him}.', obstacle="skate")
_say("help", '"First listen to the music," said the {helper}, and counted the steps.', obstacle="dance")
_say("help", '"Stand tall and open your mouth wide," said the {helper}, and sang along.', obstacle="sing")
_say("help", "The {helper} took {name} on its back and swam across the river.", obstacle="river")
_say("help", "The {helper} flew ahead and showed {name} the way through the fog.", obstacle="fog")
_say("help", "The {helper} walked ahead and made a path through the snow.", obstacle="snow")
_say("help", "The {helper} got over the wall and opened the gate from inside.", obstacle="gate")

# The wish comes true.
_say(
    "joy",
    "{name} held the {thing} tight and ran home.",
    "Full of joy, {name} carried the {thing} home.",
    "{name} laughed and danced with the {thing} all the way home.",
    wish="lost",
)
_say(
    "joy",
    "{name} brought the {thing} to {her} {relative}, and soon {rel_she} was well again.",
    "{name} ran home with the {thing}, and {her} {relative} got well.",
    wish="gift",
    occasion="ill",
)
_say(
    "joy",
    "{name} gave the {thing} to {her} {relative}, and it was the best birthday of all.",
    "{name} ran home with the {thing}, and {her} {relative} had a wonderful birthday.",
    wish="gift",
    occasion="birthday",
)
_say(
    "joy",
    "{name} gave the {thing} to {her} {relative}, and {rel_she} smiled again.",
    "{name} ran home with the {thing}, and {her} {relative} laughed for joy.",
    wish="gift",
    occasion="sad",
)
_say(
    "joy",
    "{name} ran home and made the {product}. Everyone loved it.",
    "So {name} made the {product}, and nobody had ever seen a finer one.",
    wish="make",
)
_say("joy", "At last {name} swam all the way across the pond.", obstacle="swim")
_say("joy", "At last {name} whistled a tune, and the whole meadow listened.", obstacle="whistle")
_say("joy", "At last {name} climbed to the very top and waved.", obstacle="climb")
_say("joy", "At last {name} skated over the ice in a big circle.", obstacle="skate")
_say("joy", "At last {name} danced until the stars came out.", obstacle="dance")
_say("joy", "At last {name} sang so well that people stopped to listen.", obstacle="sing")
_say(
    "joy",
    "{Her} {relative} was so happy to see {name} that {rel_she} soon was well again.",
    "{name} made soup for {her} {relative}, and soon {rel_she} was well again.",
    wish="visit",
    occasion="ill",
)
_say(
    "joy",
    "{Her} {relative} was so happy to see {name} that it was the best birthday of all.",
    "{name} and {her} {relative} ate cake until the stars came out.",
    wish="visit",
    occasion="birthday",
)
_say(
    "joy",
    "{Her} {relative} was so happy to see {name} that {rel_she} smiled again.",
    "{name} told {her} {relative} a joke, and {rel_she} laughed for joy.",
    wish="visit",
    occasion="sad",
)

_say(
    "thanks",
    "To say thank you, {name} sang a song for the {helper}.",
    "To say thank you, {name} gave the {helper} a big hug.",
    "To say thank you, {name} shared {her} supper with the {helper}.",
    mode="ask",
)

# What has changed, by what the hero was like.
for _trait, _texts in {
    "shy": (
        "From that day on, {name} was not so shy anymore.",
        "{name} was still a little shy, but now {she} had a friend.",
    ),
    "proud": (
        "{name} had learned that even the proud need a friend.",
        "From that day on, {name} was not too proud to ask for help.",
    ),
    "hasty": (
        "{name} had learned that good things take time.",
        "From that day on, {name} was not so hasty anymore.",
    ),
    "stubborn": (
        "{name} had learned that two heads are better than one.",
        "From that day on, {name} was not so stubborn anymore.",
    ),
    "lonely": (
        "From that day on, {name} was never lonely again.",
        "{name} and the {helper} became friends, and {name} was not lonely anymore.",
    ),
    "curious": (
        "And {name} was curious what the next day would bring.",
        "{name} asked the {helper} a hundred questions, for {she} was as curious as ever.",
    ),
    "cheerful": (
        "That evening, {name} was more cheerful than ever.",
        "{name} and the {helper} sang cheerful songs until it was dark.",
    ),
    "gentle": (
        "{name} had learned that a gentle heart finds friends everywhere.",
        "And the {helper} never forgot the gentle {kind}.",
    ),
    "brave": (
        "{name} had learned that even the brave need help sometimes.",
        "And the {helper} told everyone about the brave {kind}.",
    ),
    "dreamy": (
        "That night, {name} dreamed of the {helper}.",
        "And the dreamy {kind} had a new story to dream about.",
    ),
    "grumpy": (
        "From that day on, nobody called {name} grumpy anymore.",
        "{name} smiled, and {she} was not grumpy for a whole week.",
    ),
    "forgetful": (
        "{name} forgot many things, but {she} never forgot the {helper}.",
        "And even the forgetful {kind} always remembered that day.",
    ),
}.items():
    _say("change", *_texts, trait=_trait)
