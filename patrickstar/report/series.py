"""Values over the steps of a run, however long, in bounded memory.

Steps are collected in buckets of equal width; when there are too many, neighbours are merged and
the width doubles. A bucket keeps the mean and the extremes, so a spike is seen at any width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MOST = 2000  # buckets that are kept at most


@dataclass
class Bucket:
    """The values of some steps: how many, their sum, and the extremes."""

    count: int
    total: float
    low: float
    high: float

    @property
    def mean(self) -> float:
        return self.total / self.count

    def add(self, other: Bucket) -> None:
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


@dataclass
class Series:
    """Named values by step.

    Attributes:
        width: steps in a bucket.
        steps: the first step of every bucket, in order.
        values: a bucket for every step in `steps`, by name; None where there is no value.
        first, last, count: of the steps.
    """

    most: int = MOST
    width: int = 1
    count: int = 0
    first: int | None = None
    last: int | None = None
    steps: list[int] = field(default_factory=list)
    values: dict[str, list[Bucket | None]] = field(default_factory=dict)

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Take the values of a step; a step that does not come after the last is left out."""
        if self.last is not None and step <= self.last:
            return
        self.first = step if self.first is None else self.first
        self.last, self.count = step, self.count + 1
        start = step - step % self.width
        if not self.steps or self.steps[-1] != start:
            self.steps.append(start)
            for row in self.values.values():
                row.append(None)
        for name, value in values.items():
            if value is None:
                continue
            row = self.values.setdefault(name, [None] * len(self.steps))
            bucket, here = Bucket(1, value, value, value), row[-1]
            if here is None:
                row[-1] = bucket
            else:
                here.add(bucket)
        while len(self.steps) > self.most:
            self._halve()

    def _halve(self) -> None:
        self.width *= 2
        groups: dict[int, list[int]] = {}
        for place, step in enumerate(self.steps):
            groups.setdefault(step - step % self.width, []).append(place)
        self.steps = list(groups)
        for name, row in self.values.items():
            self.values[name] = [
                _merged([row[place] for place in places]) for places in groups.values()
            ]

    def points(self, name: str) -> tuple[list[int], list[Bucket]]:
        """Steps and buckets where `name` has values."""
        row = self.values.get(name, [])
        there = [(step, bucket) for step, bucket in zip(self.steps, row, strict=False) if bucket]
        return [step for step, _ in there], [bucket for _, bucket in there]

    def mean(self, name: str) -> float | None:
        """Of all steps that have `name`."""
        _, buckets = self.points(name)
        count = sum(bucket.count for bucket in buckets)
        return sum(bucket.total for bucket in buckets) / count if count else None


def _merged(buckets: list[Bucket | None]) -> Bucket | None:
    there = [bucket for bucket in buckets if bucket is not None]
    for bucket in there[1:]:
        there[0].add(bucket)
    return there[0] if there else None
