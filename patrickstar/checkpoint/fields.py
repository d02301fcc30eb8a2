"""Values out of JSON that somebody else may have written, each of the type it must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from patrickstar.errors import CheckpointError

T = TypeVar("T")


def field(values: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """`values[key]`, which must be there and a `kind`; True is no int.

    Raises:
        CheckpointError: it is missing or something else.
    """
    value = values.get(key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = "missing" if key not in values else f"a {type(value).__name__}"
        raise CheckpointError(
            f"{key!r} in the checkpoint's state.json is {what}, not a {kind.__name__}"
        )
    return value


def count(values: Mapping[str, Any], key: str) -> int:
    """`values[key]`, which must be an int of at least 0. Errors as `field`."""
    value = field(values, key, int)
    if not 0 <= value < 1 << 63:
        raise CheckpointError(
            f"{key!r} in the checkpoint's state.json is {str(value)[:40]}, no count"
        )
    return value


@contextmanager
def taking_over(what: str) -> Iterator[None]:
    """Whatever goes wrong inside means that `what` in the checkpoint is not fit for use.

    For code that was not written for values of unknown origin, such as a scheduler's.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{what} in the checkpoint does not fit this run: {type(error).__name__}: {error}"
        ) from error
