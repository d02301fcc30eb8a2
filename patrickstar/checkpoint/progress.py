"""What an optimizer knows of a parameter besides its tensors, for ranges of its rows.

A parameter that is kept whole has one range. One that is kept in pieces has as many as it has
pieces, and may be split elsewhere when it is loaded.

In `state.json`: {"rows": 256, "step": 10, "started": true, "changed": true, "gradient": true}, with
what is 0 or false left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from patrickstar.checkpoint.fields import count
from patrickstar.errors import CheckpointError


@dataclass(frozen=True)
class Progress:
    """Of `rows` rows (a tensor without dimensions is one row).

    Attributes:
        step: updates so far.
        started: the optimizer's states have values.
        changed: the weights were changed since the last update, and the masters have not followed.
        gradient: there is a gradient, of an accumulation that is not complete.
    """

    rows: int
    step: int = 0
    started: bool = False
    changed: bool = False
    gradient: bool = False

    def to_json(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in ("step", "started", "changed", "gradient")}
        return {"rows": self.rows, **{name: value for name, value in given.items() if value}}

    @classmethod
    def from_json(cls, entry: Any) -> Progress:
        """Check and understand one entry.

        Raises:
            CheckpointError: it is none.
        """
        if not isinstance(entry, dict):
            raise CheckpointError("a parameter in the checkpoint's state.json has no progress")
        flags = [bool(entry.get(name, False)) for name in ("started", "changed", "gradient")]
        return cls(count(entry, "rows"), count({"step": 0, **entry}, "step"), *flags)


def progress_of(name: str, saved: Sequence[Progress], start: int, stop: int) -> Progress:
    """Of the rows from `start` to `stop` of parameter `name`, out of ranges that cover it.

    Raises:
        CheckpointError: the ranges differ there, or do not reach that far.
    """
    found, first = [], 0
    for part in saved:
        if max(first, start) < min(first + part.rows, stop):
            found.append(part)
        first += part.rows
    if first < stop or (start < stop and not found):
        raise CheckpointError(f"state.json says nothing of rows {start} to {stop} of {name!r}")
    if not found:
        return saved[0] if saved else Progress(0)
    if len({(part.step, part.gradient) for part in found}) > 1:
        raise CheckpointError(
            f"rows {start} to {stop} of {name!r} were updated at different steps, in pieces that "
            "this run splits elsewhere; set patrickstar.piece_size as it was when saving"
        )
    return Progress(
        stop - start,
        found[0].step,
        any(part.started for part in found),
        any(part.changed for part in found),
        found[0].gradient,
    )
