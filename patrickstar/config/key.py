"""One key of the config: what it is, what becomes of it, and how a model declares it.

Every key of a section is declared exactly once. A key that is honoured is a field of the section's
pydantic model, made with `honoured`; a key that is only accepted, or refused, is a `Key` in that
module's ``OTHER_KEYS``, made with `accepted` or `rejected`. `patrickstar.config.keys` gathers both
into the one table that checks, error messages and docs are made from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pydantic import Field


class Status(enum.Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    ACCEPTED = "accepted with a warning"
    REJECTED = "rejected"


class Unset(enum.Enum):
    """Marks that there is no value, where None is one."""

    UNSET = "-"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class Key:
    """One row of the table.

    Attributes:
        path: dotted, such as ``zero_optimization.stage``; a part in angle brackets stands for any
            name.
        status: what becomes of it.
        default: DeepSpeed's default as its docs write it in JSON; UNSET where it has none.
        meaning: one line.
        note: why an accepted key has no effect, what to use instead of a rejected one, or where
            an honoured one differs from DeepSpeed.
        kind: the type a value must have, as a Python annotation; Any is not checked.
        harmless: values that ask for nothing, so that they are neither warned about nor refused.
        section: whether the value is an object whose keys are rows of their own.
        free: whether the keys of that object are not ours to know.
    """

    path: str
    status: Status
    default: Any
    meaning: str
    note: str = ""
    kind: Any = Any
    harmless: tuple[Any, ...] = ()
    section: bool = False
    free: bool = False

    @property
    def parent(self) -> str:
        """The path of the object this key is in; empty at the top level."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def honoured(
    default: Any, meaning: str, *, deepspeed: Any = UNSET, note: str = "", **constraints: Any
) -> Any:
    """A field of a section's model: a key that does what DeepSpeed's does.

    Args:
        default: ours; ``...`` makes the key required.
        meaning: one line for the table.
        deepspeed: DeepSpeed's default where it is not ours.
        note: where it differs from DeepSpeed.
        constraints: pydantic's, such as ``ge=0``.
    """
    extra = {"note": note} | ({} if deepspeed is UNSET else {"deepspeed": deepspeed})
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)
