"""YAML (and so JSON) text as plain values, read strictly: what YAML would change or drop without a word is refused.

YAML 1.1 takes `1:30` for 90, `010` for 8 and `2024-01-05` for a date, and of two equal keys the last. Here the first
three stay the text they are, and a key that occurs twice is an error.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

MAX_DEPTH: Final = 32


class YamlProblem(ValueError):
    """What is wrong with a text, and where (from 1); `line` is None where no place can be named."""

    def __init__(self, reason: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(reason)
        self.reason, self.line, self.column = reason, line, column

    @property
    def place(self) -> str:
        return "" if self.line is None else f" at line {self.line}, column {self.column}"


def load_yaml(text: str) -> Any:
    """The values in `text`. Raises YamlProblem."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        reason = " ".join((error.problem or "it cannot be read").split())
        raise YamlProblem(reason, *((mark.line + 1, mark.column + 1) if mark else ())) from None
    except yaml.reader.ReaderError as error:
        raise YamlProblem(f"it holds the character U+{_code(error.character):04X}, which YAML forbids") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: Python converts no number of more than 4,300 digits
        raise YamlProblem(" ".join(str(error).split(";")[0].split())) from None


def dump_yaml(values: Any) -> str:
    """`values` as YAML text that `load_yaml` reads back to the same."""
    return yaml.dump(values, Dumper=_Dumper, allow_unicode=True, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """PyYAML's SafeDumper, which writes the line end U+0085 as it is and so loses it."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None)


_Dumper.add_representer(str, _text)


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's SafeLoader with the refusals of this module; its resolvers are put in below."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"values are nested more than {MAX_DEPTH} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"the setting {key.value[:60]!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's own, less dates, octal, binary, hexadecimal and sexagesimal numbers.

    Each matches no more than PyYAML's, which decides what `yaml.safe_dump` puts in quotes: a text never comes back as
    something else.
    """
    narrow = {
        "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"),
        "tag:yaml.org,2002:float": re.compile(
            r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
    }
    return {
        first: [(tag, narrow.get(tag, pattern)) for tag, pattern in found if not tag.endswith(":timestamp")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_StrictLoader.yaml_implicit_resolvers = _resolvers()
