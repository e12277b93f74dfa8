"""JSON text as plain values, with one error for all that can be wrong with it."""

from __future__ import annotations

import json
import sys
from typing import Any


class JsonProblem(ValueError):
    """A text that is no JSON, or JSON that Python does not read; the message is what follows the file's name."""


def load_json(text: str | bytes) -> Any:
    """The values in `text`. Raises JsonProblem."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise JsonProblem(f"is not JSON: line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise JsonProblem("is not UTF-8 text") from None
    except RecursionError:
        raise JsonProblem("is nested too deeply") from None
    except ValueError:
        raise JsonProblem(f"holds a number of more than {sys.get_int_max_str_digits():,} digits") from None
