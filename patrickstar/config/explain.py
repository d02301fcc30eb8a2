"""What pydantic has to say about a value, as one sentence for the person who wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from patrickstar.errors import ConfigError

_LONGEST = 80


def show(value: Any) -> str:
    """`value` as JSON-minded people write it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    try:
        text = repr(value)
    except Exception:  # any object may be in a dict, and an int may be too long to print
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def wrong(path: str, value: Any, expected: str) -> str:
    """The sentence about a value of the wrong type or out of range."""
    return f"{path} is {show(value)}; expected {expected}"


def expected_by(errors: Iterable[ErrorDetails]) -> str:
    """What the branches that a value failed would have taken."""
    return " or ".join(dict.fromkeys(_expected(error) for error in errors))


def told(error: ValidationError) -> list[str]:
    """One sentence for each value that `error` is about."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for one in error.errors():
        by_path.setdefault(_path(one["loc"]), []).append(one)
    return [_sentence(path, errors) for path, errors in by_path.items()]


def _sentence(path: str, errors: list[ErrorDetails]) -> str:
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{path}: {cause}"
    if first["type"] == "missing":
        return f"{path} is missing"
    return wrong(path, first["input"], expected_by(errors))


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _expected(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "value_error":
            return str(context["error"])
        case "greater_than":
            return f"a number greater than {context['gt']}"
        case "greater_than_equal":
            return f"a number of at least {context['ge']}"
        case "less_than_equal":
            return f"a number of at most {context['le']}"
        case "literal_error":
            return str(context["expected"])
        case "model_type" | "model_attributes_type" | "dict_type":
            return "an object"
        case "tuple_type" | "list_type":
            return "a list"
        case "none_required":
            return "null"
        case "missing" | "too_long" | "too_short":
            return "a list of the right length"
        case _:
            message = error["msg"]
            return message[0].lower() + message[1:]
