"""Questions about the stories, as chats: a story and a question from the user, a short answer from the assistant.

Every answer follows from the facts the story was told from. One chat in eight asks for a story instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vramfit.starter.stories import Chance, Story, tell

ASK_FOR_STORY_ONE_IN = 8


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its one right answer; `topic` is who, where, what, why, help or end."""

    topic: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    """One exchange. `story` is the story it is about; `topic` is "story" where the user asked for one."""

    topic: str
    user: str
    assistant: str
    story: Story

    @property
    def row(self) -> dict[str, list[dict[str, str]]]:
        return {
            "messages": [{"role": "user", "content": self.user}, {"role": "assistant", "content": self.assistant}],
        }


def chats(seed: int, count: int) -> Iterator[Chat]:
    """`count` chats, each about its own story; the first n of a longer series are the series of n."""
    chance = Chance(seed)
    for _ in range(count):
        yield _chat(chance)


def _chat(chance: Chance) -> Chat:
    story = tell(chance)
    if chance.pick(range(ASK_FOR_STORY_ONE_IN)) == 0:
        wanted = "Tell me a story about a {trait} {kind} named {name}.".format_map(story.facts)
        return Chat(topic="story", user=wanted, assistant=story.text, story=story)
    asked = chance.pick(questions_about(story))
    return Chat(topic=asked.topic, user=f"{story.text}\n\n{asked.question}", assistant=asked.answer, story=story)


def questions_about(story: Story) -> tuple[Question, ...]:
    """All questions the story answers, in a fixed order."""
    facts = story.facts
    wish, kind = facts["wish"], facts["mode"] == "kind"
    asked = [
        ("who", "Who is the story about?", "It is about {name}, a {trait} {kind}."),
        ("where", "Where did {name} live?", "{name} lived {home}."),
        ("what", "What did {name} want?", _WANTED[wish]),
        ("why", "Why was that hard?", _HARD[facts["obstacle"]]),
        ("help", "Who helped {name}?", "The {helper} helped {name}."),
        ("end", "How did the story end?", _ENDED[wish]),
    ]
    if wish in ("lost", "gift", "make"):
        asked.append(("where", "Where was the {thing}?", "The {thing} was {spot}."))
    if kind:
        asked.append(("why", "Why did the {helper} help?", f"Because {{name}} {_KINDNESS[facts['need']]}."))
    if wish in ("gift", "visit"):
        asked.append(("why", f"Why did {{name}} want {_TO_DO[wish]}?", _BECAUSE[facts["occasion"]]))
    return tuple(
        Question(topic=topic, question=question.format_map(facts), answer=answer.format_map(facts))
        for topic, question, answer in asked
    )


_WANTED = {
    "lost": "{name} wanted the {thing} back.",
    "gift": "{name} wanted to bring {her} {relative} a {thing}.",
    "make": "{name} wanted to make a {product} for the {event}.",
    "learn": "{name} wanted to {skill}.",
    "visit": "{name} wanted to visit {her} {relative}.",
}

_ENDED = {
    "lost": "{name} got the {thing} back.",
    "gift": "{name} brought the {thing} to {her} {relative}.",
    "make": "{name} made the {product} for the {event}.",
    "learn": "{name} learned to {skill}.",
    "visit": "{name} came to {her} {relative}.",
}

_HARD = {
    "high": "Because it was too high.",
    "water": "Because the water was too deep.",
    "dark": "Because it was too dark.",
    "narrow": "Because the gap was too narrow.",
    "heavy": "Because the weight was too heavy.",
    "river": "Because the flood had carried the bridge away.",
    "fog": "Because the fog hid every path.",
    "snow": "Because the snow lay very deep.",
    "gate": "Because the gate was locked.",
    "swim": "Because {name} was afraid of the deep water.",
    "whistle": "Because nobody had ever shown {him} how to do it.",
    "climb": "Because {name} was afraid to fall.",
    "skate": "Because the ice was very slippery.",
    "dance": "Because {name} always got the steps wrong.",
    "sing": "Because {her} voice was thin and shaky.",
}

_KINDNESS = {
    "hungry": "shared {her} bread with the {helper}",
    "thirsty": "brought the {helper} some fresh water",
    "cold": "made a warm fire for the {helper}",
    "lonely": "told the {helper} a story",
    "lost": "showed the {helper} the way",
    "caught": "set the {helper} free",
}

_TO_DO = {"gift": "to find a {thing}", "visit": "to visit {her} {relative}"}

_BECAUSE = {
    "ill": "Because {her} {relative} was ill.",
    "birthday": "Because it was the birthday of {her} {relative}.",
    "sad": "Because {her} {relative} had been sad for days.",
}
