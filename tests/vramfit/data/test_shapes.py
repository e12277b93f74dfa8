from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.data.rows import Bytes, Row, parse_json
from vramfit.data.shapes import ROLES, Conversation, Document, Dropped, Turn, UnknownColumns, merge_turns, recognise
from vramfit.errors import DataError


def row(values: dict[str, Any]) -> Row:
    """A row as the reader gives it: numbers as their text."""
    return Row(parse_json(json.dumps(values)), Path("data.jsonl"), 1)


def convert(values: dict[str, Any], **mapping: str) -> Conversation | Document | Dropped:
    return recognise([row(values)], mapping).convert(row(values))


def turns(values: dict[str, Any], **mapping: str) -> list[tuple[str, str]]:
    found = convert(values, **mapping)
    assert isinstance(found, Conversation), found
    return [(turn.role, turn.text) for turn in found.turns]


def reason(values: dict[str, Any], **mapping: str) -> str:
    found = convert(values, **mapping)
    assert isinstance(found, Dropped), found
    return found.reason


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (["instruction", "input", "output"], "alpaca"),
        (["instruction", "response", "context"], "alpaca"),
        (["Instruction", "Output"], "alpaca"),
        (["prompt", "completion"], "prompt/completion"),
        (["question", "answer", "id"], "question/answer"),
        (["query", "response"], "question/answer"),
        (["input", "output"], "question/answer"),
        (["text", "meta"], "text"),
        (["whatever"], "text"),
    ],
)
def test_shapes_are_recognised_by_their_columns(columns: list[str], kind: str) -> None:
    assert recognise([row(dict.fromkeys(columns, "x"))]).kind == kind


def test_lists_of_turns_are_recognised() -> None:
    assert recognise([row({"conversations": [{"from": "human", "value": "x"}]})]).kind == "sharegpt"
    assert recognise([row({"messages": [{"role": "user", "content": "x"}]})]).kind == "messages"
    assert recognise([row({"conversations": [{"role": "user", "content": "x"}]})]).kind == "messages"


def test_unknown_columns_ask_for_a_mapping() -> None:
    with pytest.raises(DataError, match=r"The columns \('foo', 'bar'\)") as caught:
        recognise([row({"foo": "x", "bar": "y"})])
    assert "map" in caught.value.remedy
    values = {"foo": "x", "bar": "y"}
    assert turns(values, instruction="foo", output="bar") == [("user", "x"), ("assistant", "y")]
    assert turns(values, input="foo", output="bar") == [("user", "x"), ("assistant", "y")]
    assert convert(values, text="bar") == Document("y")


def test_case_029_a_mapping_to_a_column_the_data_lacks_is_refused() -> None:
    with pytest.raises(DataError, match="no column 'parent_id', it has: 'text'"):
        recognise([row({"text": "x"})], {"text": "parent_id"})
    with pytest.raises(DataError, match="'banana' is nothing a column can be mapped to"):
        recognise([row({"text": "x"})], {"banana": "text"})
    with pytest.raises(DataError, match="not enough"):
        recognise([row({"text": "x"})], {"system": "text"})


def test_alpaca_with_everything() -> None:
    values = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["hi", "hello"]],
    }
    assert turns(values) == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]
    assert "pairs" in reason({**values, "history": [["a"]]})
    assert "history" in reason({**values, "history": "gibberish"})


def test_prompts_as_lists_of_messages() -> None:
    values = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    assert turns(values) == [("user", "q"), ("assistant", "a")]


def test_case_032_a_null_or_missing_instruction_is_a_verdict() -> None:
    shape = recognise([row({"instruction": "i", "input": "x", "output": "y"})])
    null = shape.convert(row({"instruction": None, "input": "x", "output": "y"}))
    missing = shape.convert(row({"input": "x", "output": "y"}))
    assert null == missing == Dropped("'instruction' is null or missing")


def test_case_031_an_object_for_an_answer_is_named() -> None:
    assert reason({"instruction": "i", "output": {"a": None, "b": 1}}) == "'output' must be text, it is an object"


def test_case_023_a_number_or_true_in_a_text_column_is_text() -> None:
    assert turns({"question": "when", "answer": 1984})[1] == ("assistant", "1984")
    assert turns({"question": "is it", "answer": True})[1] == ("assistant", "true")


def test_case_024_a_printed_list_is_parsed_or_refused() -> None:
    printed = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert turns({"messages": json.dumps(printed)}) == [("user", "q"), ("assistant", "a")]
    assert "printed list that is not JSON" in reason({"messages": str(printed)})


def sharegpt(*names: str) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": f"{name} {n}"} for n, name in enumerate(names)]}


def test_case_044_tool_turns_and_a_system_turn_are_known() -> None:
    found = turns(sharegpt("system", "human", "function_call", "observation", "gpt"))
    assert [role for role, _ in found] == ["system", "user", "assistant", "tool", "assistant"]


def test_case_045_a_misspelt_role_is_named_with_the_known_ones() -> None:
    why = reason(sharegpt("human", "gpt", "hummany"))
    assert "'hummany'" in why
    assert all(role in why for role in ROLES)
    assert reason({"messages": [{"role": "", "content": "x"}]}) == "a turn has no role"


def test_case_047_048_aliases_are_accepted_also_mixed() -> None:
    assert [role for role, _ in turns(sharegpt("user", "assistant", "human", "gpt"))] == ["user", "assistant"] * 2


def test_case_051_blank_tools_are_no_tools() -> None:
    for blank in (" ", "", None, "[]", []):
        found = convert({**sharegpt("human", "gpt"), "tools": blank})
        assert isinstance(found, Conversation)
        assert found.tools == ()
    assert "tools are not JSON" in reason({**sharegpt("human", "gpt"), "tools": "[{"})


def test_tools_become_schemas_with_numbers_again() -> None:
    tool = {"name": "f", "parameters": {"maximum": 3}}
    found = convert({**sharegpt("human", "gpt"), "tools": json.dumps([tool])})
    assert isinstance(found, Conversation)
    assert found.tools == ({"type": "function", "function": tool},)
    assert isinstance(found.tools[0]["function"]["parameters"]["maximum"], int)


def test_case_053_null_content_beside_tool_calls_is_accepted() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    found = convert(
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1"},
            ]
        }
    )
    assert isinstance(found, Conversation)
    assert found.turns[1] == Turn("assistant", "", ({"name": "f", "arguments": {"x": 1}},))


def test_a_function_call_turn_is_a_call_or_its_text() -> None:
    call = json.dumps({"name": "f", "arguments": {"x": [1, "y"]}})
    values = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": call}]}
    found = convert(values)
    assert isinstance(found, Conversation)
    assert found.turns[1].calls == ({"name": "f", "arguments": {"x": [1, "y"]}},)
    values["conversations"][1]["value"] = "f(x)"
    assert turns(values)[1] == ("assistant", "f(x)")


@pytest.mark.parametrize("key", ["text", "value", "content"])
def test_content_in_parts(key: str) -> None:
    parts = [{"type": "text", key: "one "}, {"type": "text", key: "two"}]
    values = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]}
    assert turns(values)[0] == ("user", "one two")


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"role": "user", "content": {"a": 1}}, "content is an object"),
        ({"role": "user", "content": [{"type": "image_url", "url": "x"}]}, "only text can be learned"),
        ({"role": "user", "content": [3, None]}, "a part of a turn is null"),
        ({"role": "user", "content": [{"type": "text", "text": []}]}, "a part of a turn is a list"),
        ("just text", "a turn is text, not an object"),
        ({"role": 7, "content": "x"}, "unknown role '7'"),
    ],
)
def test_broken_turns_are_verdicts(message: Any, why: str) -> None:
    shape = recognise([row({"messages": [{"role": "user", "content": "x"}]})])
    found = shape.convert(row({"messages": [message, {"role": "assistant", "content": "a"}]}))
    assert isinstance(found, Dropped)
    assert why in found.reason


def test_conversations_without_answers_are_verdicts() -> None:
    assert reason(sharegpt("human", "human")) == "no turn is the assistant's"
    assert reason(sharegpt("system")) == "no turn is the assistant's"
    shape = recognise([row(sharegpt("human", "gpt"))])
    for value, why in (([], "empty"), (None, "null"), ({}, "an object"), ("text", "not JSON")):
        found = shape.convert(row({"conversations": value}))
        assert isinstance(found, Dropped)
        assert why in found.reason
    blank = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]}
    assert reason(blank) == "the assistant's turns are empty"


@pytest.mark.parametrize(
    ("given", "weight"), [({}, 1), ({"weight": 0}, 0), ({"weight": 1}, 1), ({"loss_weight": 0.0}, 0),
                          ({"train": False}, 0), ({"train": True}, 1), ({"weight": None}, 1), ({"weight": 0.5}, 0.5),
                          ({"loss_weight": "2.5"}, 2.5), ({"weight": 100}, 100), ({"weight": 1e-6}, 1e-6)],
)  # fmt: skip
def test_weights_of_messages(given: dict[str, Any], weight: float) -> None:
    found = convert({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **given}]})
    assert isinstance(found, Conversation)
    assert found.turns[1].weight == weight


@pytest.mark.parametrize(
    ("weight", "value"), [({"loss_weight": -1}, "-1"), ({"weight": 101}, "101"), ({"weight": "nan"}, "nan"),
                          ({"weight": "inf"}, "inf"), ({"weight": 1e-7}, "1e-07"), ({"weight": "much"}, "no number"),
                          ({"weight": 10**400}, "no number"), ({"weight": [1]}, "no number")],
)  # fmt: skip
def test_a_weight_that_cannot_be_is_a_reason_to_drop_the_row(weight: dict[str, Any], value: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **weight}]
    shape = recognise([row({"messages": messages})])
    found = shape.convert(Row({"messages": messages}, Path("t"), 1))
    assert isinstance(found, Dropped)
    assert value in found.reason
    assert repr(next(iter(weight))) in found.reason
    asked = convert({"messages": [{"role": "user", "content": "q", **weight}, {"role": "assistant", "content": "a"}]})
    assert isinstance(asked, Conversation)  # questions are not learned, whatever they weigh


def test_an_empty_answer_between_others_is_never_learned() -> None:
    asked, empty, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": None}, "a"
    found = convert({"messages": [asked, empty, asked, {"role": "assistant", "content": answer}]})
    assert isinstance(found, Conversation)
    assert [turn.weight for turn in found.turns if turn.role == "assistant"] == [0, 1]
    history = convert({"instruction": "i", "output": "o", "history": [["q", " "], ["q", "a"]]})
    assert isinstance(history, Conversation)
    assert [turn.weight for turn in history.turns if turn.role == "assistant"] == [0, 1, 1]
    merged = merge_turns([Turn("assistant", "", weight=0), Turn("assistant", "a"), Turn("assistant", " ", weight=0)])
    assert merged == (Turn("assistant", "a"),)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_what_was_thought_stands_before_the_answer(key: str) -> None:
    asked = {"role": "user", "content": "q", key: "not the assistant's"}
    assert turns({"messages": [asked, {"role": "assistant", "content": "\na", key: "because\n"}]}) == [
        ("user", "q"),
        ("assistant", "<think>\nbecause\n</think>\n\na"),
    ]
    for nothing in (None, "", " ", ["x"]):
        assert turns({"messages": [asked, {"role": "assistant", "content": "a", key: nothing}]})[1][1] == "a"
    twice = {"role": "assistant", "content": "<think>b</think>a", key: "because"}
    assert turns({"messages": [asked, twice]})[1][1] == "<think>b</think>a"


def test_names_that_mean_the_system_turn_and_the_tools() -> None:
    for name in ("system", "system_prompt", "system_message", "System_Prompt"):
        assert turns({name: "s", "question": "q", "response": "a"})[0] == ("system", "s")
    found = convert({**sharegpt("human", "gpt"), "functions": [{"name": "f", "parameters": {}}]})
    assert isinstance(found, Conversation)
    assert found.tools == ({"type": "function", "function": {"name": "f", "parameters": {}}},)


def test_bytes_are_no_text_to_learn() -> None:
    shape = recognise([row({"question": "q", "answer": "a"})])
    found = shape.convert(Row({"question": "q", "answer": Bytes(bytes="3")}, Path("t.parquet"), 1))
    assert found == Dropped("'answer' must be text, it is bytes that are no text")


def test_joined_turns_keep_all_text_and_have_the_least_weight() -> None:
    answers = (Turn("assistant", "c", weight=2.0), Turn("assistant", "d", weight=0.5))
    merged = merge_turns([Turn("user", "a"), Turn("user", "b"), *answers, Turn("user", "e"), answers[0]])
    assert [(turn.role, turn.text, turn.weight) for turn in merged] == [
        ("user", "a\n\nb", 1),
        ("assistant", "c\n\nd", 0.5),
        ("user", "e", 1),
        ("assistant", "c", 2),
    ]
    assert (
        merge_turns([*answers, Turn("assistant", "f", weight=0)])[0].weight == 0
    )  # what has weight 0 is never learned


@pytest.mark.parametrize("name", ["content", "text"])
def test_rows_that_are_turns_are_not_taken_for_documents(name: str) -> None:
    turns = [row({"role": "user", name: "q"}), row({"role": "assistant", name: "a"})]
    with pytest.raises(UnknownColumns, match="'role'"):
        recognise(turns)
    assert recognise(turns, {"text": name}).kind == "text"


def test_one_column_is_text_where_it_holds_text() -> None:
    assert recognise([row({"poem": None}), row({"poem": "a"})]).columns == {"text": "poem"}
    for value in (1, True, None):
        with pytest.raises(UnknownColumns, match="'version'"):
            recognise([row({"version": value})])
