"""What was tried of one kind of fault, and how it ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """A row of the table in docs/reliability.md.

    Attributes:
        what: the fault, and what has to hold all the same.
        tried: how often.
        lost: for each time that it did not hold, how to repeat it and what came instead.
        seen: whatever else was counted, by name.
    """

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)

    def survived(self) -> None:
        self.tried += 1

    def failed(self, why: str) -> None:
        self.tried += 1
        self.lost.append(why)

    def judge(self, why: str | None) -> None:
        """`why` it failed, or None."""
        if why is None:
            self.survived()
        else:
            self.failed(why)

    def count(self, name: str, by: int = 1) -> None:
        self.seen[name] = self.seen.get(name, 0) + by

    def most(self, name: str, value: float) -> None:
        self.seen[name] = max(self.seen.get(name, value), value)

    def add(self, other: dict[str, Any]) -> None:
        """Count what another tally of the same fault has counted, as JSON."""
        self.tried += other["tried"]
        self.lost += other["lost"]
        for what, times in other["seen"].items():
            self.count(what, times)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def attempt(tally: Tally, how: str, work: Callable[[], str | None]) -> None:
    """Count one try; `work` returns why it failed, and anything it raises is a failure too."""
    try:
        tally.judge(None if (why := work()) is None else f"{how}: {why}")
    except Exception as error:
        tally.failed(f"{how}: {type(error).__name__}: {str(error)[:500]}")
