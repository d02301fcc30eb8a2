"""The files of a run folder as they are read, checked line by line.

The writer is `patrickstar.engine.run_folder`. A field that is not known is ignored and an event
that is not known is skipped, so that an older version can read what a newer one recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from patrickstar.memory.sizes import format_bytes

FORMAT = 1

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]
Id = Annotated[int, Field(ge=0, le=2**53)]
Name = Annotated[str, Field(max_length=200)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Tier(_Model):
    """A tier and its budget in bytes."""

    name: Name
    budget: Bytes | None = None


class Weights(_Model):
    """What is in the chunks of the same weights; `names` are the first of `count` parameters."""

    chunks: list[Id]
    names: list[str] = []
    count: int = 0


class Facts(_Model):
    """`facts.json`. What else is in it is kept for the table of facts."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)
    format: int
    tiers: Annotated[list[Tier], Field(min_length=1, max_length=16)]
    weights: list[Weights] = []


class TierPlan(_Model):
    """What a plan expects of one tier, in bytes; `in_use` at every moment."""

    peak: Bytes
    loaded: Bytes
    saved: Bytes
    smallest: Bytes = 0
    in_use: list[Bytes] = []


class Plan(_Model):
    """What the planner expects of an iteration."""

    moments: int
    tiers: dict[Name, TierPlan]


class Plans(_Model):
    """`plan.json`."""

    plans: list[Plan] = []


class Step(_Model):
    """A line of `steps.jsonl`, or of `metrics.jsonl`, which has `tokens_per_s` too."""

    step: Id
    loss: Number | None = None
    lr: Number | None = None
    grad_norm: Number | None = None
    step_time_s: Seconds
    tokens_per_s: Number | None = None
    peak_bytes: dict[Name, Bytes] = {}
    moved_bytes: dict[Name, Bytes] = {}


class _Event(_Model):
    time: Seconds


class Iteration(_Event):
    """An iteration begins; `plan` is the number of the plan it follows."""

    event: Literal["iteration"]
    step: Id
    planned: bool
    plan: int | None = None


class End(_Event):
    """It is over, by a step if it is complete."""

    event: Literal["end"]
    complete: bool


class ChunkEvent(_Event):
    """A chunk is spoken of for the first time."""

    event: Literal["chunk"]
    chunk: Id
    kind: Name
    bytes: Bytes


class Placed(_Event):
    """A copy takes room on a tier; `resident` when it did so before the iteration began."""

    event: Literal["placed", "resident"]
    chunk: Id
    tier: Name


class Left(_Event):
    """A copy is gone; `why` is a `patrickstar.memory.Why`."""

    event: Literal["left"]
    chunk: Id
    tier: Name
    why: Name


class Memory(_Event):
    """The largest use of a tier since the last event of this kind, by kind of content."""

    event: Literal["memory"]
    tier: Name
    bytes: dict[Name, Bytes]


class Moment(_Event):
    """Other chunks are used from now on."""

    event: Literal["moment"]


class _Span(_Event):
    begin: Seconds
    end: Seconds


class Transfer(_Span):
    """A copy to `target` was made."""

    event: Literal["transfer"]
    chunk: Id
    source: Name
    target: Name
    bytes: Bytes


class Collective(_Span):
    """Ranks exchanged the contents of a chunk."""

    event: Literal["collective"]
    name: Name
    chunk: Name
    bytes: Bytes


class Wait(_Span):
    """The processor stood still until a transfer or a collective ended."""

    event: Literal["wait"]


class Update(_Span):
    """The weights in a chunk were updated."""

    event: Literal["update"]
    chunk: Id


class Segment(_Span):
    """A forward, backward, step or evaluation."""

    event: Literal["segment"]
    kind: Name


Event = (
    Iteration
    | End
    | ChunkEvent
    | Placed
    | Left
    | Memory
    | Moment
    | Transfer
    | Collective
    | Wait
    | Update
    | Segment
)
EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
KNOWN = frozenset(
    "iteration end chunk placed resident left memory moment transfer collective wait update "
    "segment".split()
)


# What a fact is called in the table, and whether it is a number of bytes. A group has a chunk for
# weights, one for their gradients, one for their masters and one for each state of the optimizer.
_LABELS = {
    "chunks": ("groups of chunks", False),
    "chunk_elements": ("weights in the longest chunk", False),
    "state_bytes": ("state, whole chunks", True),
}


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """Facts beyond those with a meaning of their own, for a table: flat, and short."""
    rows: dict[str, str] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            rows |= {f"{key} {inner}": text for inner, text in as_text(value).items()}
        elif not isinstance(value, list):
            label, bytes_ = _LABELS.get(key, (key, key.endswith("_bytes")))
            number = format_bytes(value) if bytes_ and type(value) is int else None
            rows[label] = number or (f"{value:,}" if type(value) is int else str(value))
    return {key[:80]: text[:200] for key, text in list(rows.items())[:40]}
