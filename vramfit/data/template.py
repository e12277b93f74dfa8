"""A model's chat template: what it can render, and the text of a conversation with the exact place of every answer.

What a template can do is found by rendering small conversations with words that occur nowhere else, never by looking at
its source. Where it cannot (system turns, tool calls, two turns of one role), the conversation is rewritten in the
plainest way that loses no text, and every such change is counted and told.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from vramfit.data.rendering import Answer, Message, Renderer, Request, TemplateRefusal
from vramfit.data.shapes import Conversation, Turn, merge_turns
from vramfit.errors import DataError

CHATML_FILE: Final = Path(__file__).with_name("chatml.jinja")
_ASKED, _ANSWERED, _ORDERED, _FOUND = "PROBEASKED", "PROBEANSWERED", "PROBEORDERED", "PROBEFOUND"
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A word."}}},
    },
}
_CALL: Final = {"name": "probecall", "arguments": {"x": "PROBEARGUMENT"}}


def default_template(tokenizer: Any) -> str:
    """ChatML for a tokenizer that has no template, every turn closed by a token the model can end on.

    `<|im_end|>` where that is one token of the vocabulary, the tokenizer's own end token otherwise; a BOS in front
    where the tokenizer puts one in front of plain text.
    """
    text = CHATML_FILE.read_text(encoding="utf-8")
    known = tokenizer.get_vocab()
    if "<|im_end|>" not in known and tokenizer.eos_token:
        text = text.replace("'<|im_end|>'", "eos_token")
    ids = tokenizer("a")["input_ids"]
    if tokenizer.bos_token_id is not None and ids and ids[0] == tokenizer.bos_token_id:
        text = "{{- bos_token -}}\n" + text
    return text


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a template renders. `call_style`: arguments as an object, as JSON text, or not at all (None).

    `end_of_turn` ends every answer; `ending` is all that follows the last one, and begins with `end_of_turn`.
    """

    system: bool
    late_system: bool
    tool_role: bool
    call_style: str | None
    tools: bool
    repeats: bool
    assistant_first: bool
    generation_prompt: bool
    end_of_turn: str
    ending: str


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the [start, end) character spans of the answers to be learned, in order.

    `weights` are the spans' weights in the loss, () where all are 1. `learns_end` is whether the last turn is learned.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    ends_with_answer: bool
    learns_end: bool
    weights: tuple[float, ...] = ()


_Rendering = Generator[list[Request], list[Answer | TemplateRefusal], Rendered]


class Template:
    """The chat template of one tokenizer. Raises DataError when it cannot render even one question and its answer."""

    def __init__(self, tokenizer: Any) -> None:
        self._renderer = Renderer(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._marks = {str(token) for token in (*tokenizer.all_special_tokens, *added.values())} - {""}
        self.changes: Counter[str] = Counter()
        self.can = self._probe()

    def render(self, conversation: Conversation, *, last_only: bool = False) -> Rendered:
        """The text and where its answers are. Raises TemplateRefusal."""
        [result] = self.render_all([conversation], last_only=last_only)
        if isinstance(result, TemplateRefusal):
            raise result
        return result

    def render_all(
        self, conversations: Sequence[Conversation], *, last_only: bool = False
    ) -> list[Rendered | TemplateRefusal]:
        """`render` for many at once, each with its text or its refusal. Raises DataError for a template out of limits.

        Every conversation is a generator that asks for renderings and goes on with the answers; what all of them ask
        for goes to the rendering process in one message.
        """
        works = [self._rendering(conversation, last_only) for conversation in conversations]
        results: dict[int, Rendered | TemplateRefusal] = {}
        waiting: dict[int, list[Request]] = {}
        answers: dict[int, list[Answer | TemplateRefusal] | None] = dict.fromkeys(range(len(works)))
        while answers:
            for index, found in answers.items():
                try:
                    waiting[index] = next(works[index]) if found is None else works[index].send(found)
                except StopIteration as end:
                    results[index] = end.value
                except TemplateRefusal as refusal:
                    results[index] = refusal
            replies = iter(self._renderer.render([request for asked in waiting.values() for request in asked]))
            answers = {index: [next(replies) for _ in asked] for index, asked in waiting.items()}
            waiting = {}
        return [results[index] for index in range(len(works))]

    def _rendering(self, conversation: Conversation, last_only: bool) -> _Rendering:
        changed: set[str] = set()
        turns = self._adapt(conversation, changed)
        messages = self._messages(turns)
        tools = list(conversation.tools) if conversation.tools and self.can.tools else None
        answers = [index for index, turn in enumerate(turns) if turn.role == "assistant" and turn.weight]
        if last_only:
            answers = answers[-1:]
        before, after = [(index, True) for index in answers], [(index + 1, False) for index in answers]
        prefixes = tuple(part for part in before + after if 0 < part[0] < len(messages))
        [whole] = yield [Request(messages=messages, tools=tools, prefixes=prefixes)]
        if isinstance(whole, TemplateRefusal):
            raise whole
        lengths = dict(zip(prefixes, whole.lengths, strict=True)) | {(len(messages), False): len(whole.text)}
        spans = []
        for index in answers:
            span = yield from self._span(index, messages, tools, whole.text, lengths)
            spans.append(span)
        if changed:
            self.changes.update(sorted(changed))  # a set has another order in every process
        weights = tuple(turns[index].weight for index in answers)
        return Rendered(
            whole.text,
            tuple(spans),
            ends_with_answer=turns[-1].role == "assistant",
            learns_end=answers[-1:] == [len(turns) - 1],
            weights=() if all(weight == 1 for weight in weights) else weights,
        )

    def _text(self, messages: Sequence[Message], tools: list[Any] | None = None, *, asks: bool = False) -> str:
        """Render one. Raises TemplateRefusal."""
        [found] = self._renderer.render([Request(messages=messages, tools=tools, asks=asks)])
        if isinstance(found, TemplateRefusal):
            raise found
        return found.text

    def _probe(self) -> Abilities:
        asked = {"role": "user", "content": _ASKED}
        answered = {"role": "assistant", "content": _ANSWERED}
        try:
            text = self._text([asked, answered])
        except TemplateRefusal as refusal:
            raise DataError(
                f"The model's chat template cannot render a question and its answer: {refusal}",
                "Mend chat_template.jinja in the model's folder, or remove it to use ChatML.",
            ) from None
        if _ASKED not in text or _ANSWERED not in text:
            raise DataError(
                "The model's chat template leaves the text of a turn out",
                "Mend chat_template.jinja in the model's folder, or remove it to use ChatML.",
            )
        ending = text[text.rindex(_ANSWERED) + len(_ANSWERED) :]
        ordered = {"role": "system", "content": _ORDERED}
        found = {"role": "tool", "content": _FOUND, "name": "probecall", "tool_call_id": "000000001"}
        return Abilities(
            system=self._shows(_ORDERED, [ordered, asked, answered]),
            late_system=self._shows(_ORDERED, [asked, answered, ordered, asked, answered]),
            tool_role=self._shows(_FOUND, [asked, answered, found, answered]),
            call_style=self._call_style(asked, found, answered),
            tools=self._shows("probetool", [asked, answered], tools=[_TOOL]),
            repeats=self._shows("PROBESECOND", [asked, {"role": "user", "content": "PROBESECOND"}, answered]),
            assistant_first=self._shows(
                "PROBEFIRST", [{"role": "assistant", "content": "PROBEFIRST"}, asked, answered]
            ),
            generation_prompt=self._asks(asked),
            end_of_turn=self._end_of_turn(asked, answered, ending),
            ending=ending,
        )

    def _end_of_turn(self, asked: Message, answered: Message, ending: str) -> str:
        """What follows every answer: some templates write more after the last one, such as an end of the whole."""
        try:
            text = self._text([asked, answered, asked, {**answered, "content": "PROBESECOND"}])
        except TemplateRefusal:
            return ending.strip()
        behind = text.partition(_ANSWERED)[2]
        shared = ending[: _shared_start(ending, behind)]
        if shared != ending:  # they part inside a mark: back to where a mark or a line ends
            ends = [shared.rindex(mark) + len(mark) for mark in self._marks if mark in shared]
            shared = shared[: max(ends, default=len(shared.rpartition("\n")[0]))]
        return shared.strip()

    def _shows(self, word: str, messages: list[Message], tools: list[Any] | None = None) -> bool:
        try:
            return word in self._text(messages, tools)
        except TemplateRefusal:
            return False

    def _asks(self, asked: Message) -> bool:
        try:
            return self._text([asked], asks=True) != self._text([asked])
        except TemplateRefusal:
            return False

    def _call_style(self, asked: Message, found: Message, answered: Message) -> str | None:
        for style in ("object", "text"):
            called = {"role": "assistant", "content": "", "tool_calls": _tool_calls((_CALL,), style)}
            if self._shows("probecall", [asked, called, found, answered]) and self._shows(
                "PROBEARGUMENT", [asked, called, found, answered]
            ):
                return style
        return None

    def _adapt(self, conversation: Conversation, changed: set[str]) -> tuple[Turn, ...]:
        """The turns as this template can take them; what was changed goes to `changed` as sentences."""
        turns = list(conversation.turns)
        if conversation.tools and not self.can.tools:
            changed.add("the list of tools was written into the system turn, because the template has no place for it")
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in conversation.tools)
            turns.insert(0, Turn("system", f"You may call these tools:\n{listed}"))
        if self.can.call_style is None and any(turn.calls for turn in turns):
            changed.add("tool calls were written as JSON text, because the template has no form for them")
            turns = [_spelled_out(turn) for turn in turns]
        if not self.can.tool_role and any(turn.role == "tool" for turn in turns):
            changed.add("results of tools were given as user turns, because the template has no tool role")
            turns = [replace(turn, role="user") if turn.role == "tool" else turn for turn in turns]
        turns = self._place_system(turns, changed)
        if not self.can.repeats and any(a.role == b.role for a, b in pairwise(turns)):
            changed.add("neighbouring turns of one role were joined, because the template wants them to alternate")
            if any(a.role == b.role == "assistant" and _differ(a, b) for a, b in pairwise(turns)):
                changed.add("joined answers had different weights, of which the least was taken")
            turns = list(merge_turns(turns))
        if turns[0].role == "assistant" and not self.can.assistant_first:
            raise TemplateRefusal("the conversation begins with the assistant")
        return tuple(turns)

    def _place_system(self, turns: list[Turn], changed: set[str]) -> list[Turn]:
        """System turns where the template takes them, otherwise at the head of the next user turn."""
        if all(turn.role != "system" for turn in turns):
            return turns
        leading = next((index for index, turn in enumerate(turns) if turn.role != "system"), len(turns))
        if leading > 1:  # templates know one system turn
            turns = [*merge_turns(turns[:leading]), *turns[leading:]]
            leading = 1
        placed: list[Turn] = []
        waiting: list[str] = []
        for index, turn in enumerate(turns):
            fits = self.can.system if index < leading else self.can.late_system
            if turn.role == "system" and not fits:
                waiting.append(turn.text)
                changed.add("system turns were put at the head of a user turn, because the template refuses them there")
            elif turn.role == "user" and waiting:
                placed.append(replace(turn, text="\n\n".join([*waiting, turn.text])))
                waiting = []
            else:
                placed.append(turn)
        return placed or turns

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        """Turns as the dicts templates read. A tool's result gets the id and name of the call it answers, in order."""
        messages: list[Message] = []
        open_calls: list[Message] = []
        for turn in turns:
            message: Message = {"role": turn.role, "content": turn.text}
            if turn.calls:
                message["tool_calls"] = _tool_calls(turn.calls, self.can.call_style or "object")
                open_calls = list(message["tool_calls"])
            elif turn.role == "tool" and open_calls:
                call = open_calls.pop(0)
                message |= {"tool_call_id": call["id"], "name": call["function"]["name"]}
            messages.append(message)
        return messages

    def _span(
        self,
        index: int,
        messages: list[Message],
        tools: list[Any] | None,
        text: str,
        lengths: dict[tuple[int, bool], int | None],
    ) -> Generator[list[Request], list[Answer | TemplateRefusal], tuple[int, int]]:
        """Where answer `index` is in `text`: from what the template asks with, to the mark that ends its turn.

        First by prefixes: the conversation up to the question, and up to the answer, are beginnings of the whole.
        Templates that render a turn differently when it is the last one break that; there the place is where the
        text changes when the answer is changed.
        """
        start, end = lengths.get((index, True)), lengths.get((index + 1, False))
        if start is None or end is None or (not self.can.generation_prompt):
            replies = yield [
                Request(messages=[*messages[:index], other, *messages[index + 1 :]], tools=tools)
                for other in _others(messages[index])
            ]
            changed = _changed_part(text, replies)
            start = changed[0] if start is None or not self.can.generation_prompt else start
            end = changed[1] if end is None else end
            mark = text.find(self.can.end_of_turn, changed[1]) if self.can.end_of_turn else -1
            end = max(end, changed[1]) if mark < 0 else mark + len(self.can.end_of_turn)
        if index == len(messages) - 1 and text.endswith(self.can.ending):
            end = len(text) - len(self.can.ending.lstrip()) + len(self.can.end_of_turn)
        # What follows the mark, mostly a line end, is the template's and not the model's to write.
        trimmed = text[start:end].rstrip()
        if self.can.end_of_turn and trimmed.endswith(self.can.end_of_turn):
            end = start + len(trimmed)
        return start, end


def _differ(one: Turn, other: Turn) -> bool:
    return one.weight != other.weight and one.says_something and other.says_something


def _changed_part(text: str, replies: Sequence[Answer | TemplateRefusal]) -> tuple[int, int]:
    """The part of `text` that the renderings with another answer lack. Raises TemplateRefusal where there is none."""
    start, end = len(text), 0
    for reply in replies:
        if isinstance(reply, TemplateRefusal):
            raise reply
        changed = reply.text
        if changed == text:
            continue
        start = min(start, _shared_start(text, changed))
        end = max(end, len(text) - _shared_start(text[::-1], changed[::-1]))
    if end <= start:
        raise TemplateRefusal("the template leaves an answer out")
    return start, end


def _shared_start(one: str, other: str) -> int:
    """How many characters both begin with. Halving keeps the comparing in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _others(message: Message) -> list[Message]:
    """The message with every part of it replaced by something that shares neither its first nor its last character."""
    changed = []
    content = message["content"]
    if content.strip():
        bare = content.strip()
        first = "Q" if bare[0] != "Q" else "Z"
        last = "Q" if bare[-1] != "Q" else "Z"
        changed.append({**message, "content": f"{first}{last}"})
    if "tool_calls" in message:
        calls = [
            {**call, "function": {"name": "\u0001", "arguments": {"\u0001": "\u0001"}}}
            for call in message["tool_calls"]
        ]
        changed.append({**message, "tool_calls": calls})
    return changed


def _tool_calls(calls: Sequence[dict[str, Any]], style: str) -> list[Message]:
    """OpenAI's form. Ids are nine digits, which is what the strictest templates ask for."""
    made = []
    for number, call in enumerate(calls, start=1):
        arguments = call["arguments"]
        if style == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call["name"], "arguments": arguments}
        made.append({"type": "function", "id": f"{number:09d}", "function": function})
    return made


def _spelled_out(turn: Turn) -> Turn:
    """The turn with its calls as JSON text, one a line, after what it says."""
    calls = [json.dumps(call, ensure_ascii=False) for call in turn.calls]
    return replace(turn, text="\n".join([turn.text, *calls] if turn.text.strip() else calls), calls=())
