"""One key of the config: what it is, what becomes of it, and how a section declares it.

Every key is declared exactly once, in the module of its concern. A key that is honoured is a field
of the section's pydantic model, made with `honoured`. A key that is only accepted, or refused, or
an old name, is a `Key` in that module's ``OTHER_KEYS``, made with `accepted`, `rejected` or
`renamed`. `patrickstar.config.keys` gathers both into the one table that checks, error messages and
documentation are made from.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field


class Status(enum.Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    ACCEPTED = "accepted"
    REJECTED = "rejected"


class Unset(enum.Enum):
    """Says that there is no value, where None is one."""

    UNSET = "unset"


UNSET = Unset.UNSET


@dataclass(frozen=True)
class Key:
    """One row of the table.

    Attributes:
        path: dotted, such as ``zero_optimization.stage``.
        status: what becomes of it.
        default: DeepSpeed's; UNSET where it has none.
        meaning: one line.
        note: why an accepted key has no effect here, what to use instead of a rejected one, or
            where an honoured one differs from DeepSpeed. A key without a note inside an accepted or
            rejected section shares the fate of that section.
        kind: the type of its values, as a Python annotation; Any is not checked here.
        harmless: values that ask for nothing: they are neither warned about nor refused.
        section: whether its value is an object.
        switch: of a section: the key in it that turns it on, and whether it is on without that key.
        free: of a section: whether keys are allowed in it that are not in the table.
        today: of an old name: the path of the key that took its place.
        convert: of an old name: makes today's value of an old one.
        ours: our own default, of a key of ours that DeepSpeed does not have.
    """

    path: str
    status: Status
    default: Any
    meaning: str
    note: str = ""
    kind: Any = Any
    harmless: tuple[Any, ...] = ()
    section: bool = False
    switch: tuple[str, bool] | None = None
    free: bool = False
    today: str = ""
    convert: Callable[[Any], Any] | None = None
    ours: Any = UNSET

    @property
    def parent(self) -> str:
        """The path of the section this key is in; empty at the top level."""
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether `value` is one of the harmless ones; 0 is not False here."""
        return any(
            value == one and isinstance(value, bool) is isinstance(one, bool)
            for one in self.harmless
        )


def honoured(
    default: Any, meaning: str, *, deepspeed: Any = UNSET, note: str = "", **constraints: Any
) -> Any:
    """A field of a section's model: a key that means what it means to DeepSpeed.

    Args:
        default: ours; ``...`` makes the key required.
        meaning: one line for the table.
        deepspeed: DeepSpeed's default, where it is not ours.
        note: where it differs from DeepSpeed.
        constraints: pydantic's, such as ``alias``.
    """
    extra = {"note": note} | ({} if deepspeed is UNSET else {"deepspeed": deepspeed})
    return Field(default, description=meaning, json_schema_extra=extra, **constraints)


def accepted(
    path: str,
    kind: Any,
    default: Any,
    meaning: str,
    because: str = "",
    *,
    harmless: tuple[Any, ...] | None = None,
) -> Key:
    """A key that has no effect here, which a warning says together with the reason.

    Args:
        path: dotted.
        kind: the type of its values.
        default: DeepSpeed's.
        meaning: one line.
        because: why it has no effect.
        harmless: see `Key`; without it, False and None where they are the default.
    """
    return Key(path, Status.ACCEPTED, default, meaning, because, kind, _harmless(default, harmless))


def rejected(
    path: str,
    kind: Any,
    default: Any,
    meaning: str,
    instead: str = "",
    *,
    harmless: tuple[Any, ...] | None = None,
) -> Key:
    """A key that is refused, because without its effect the run would be another one.

    Args:
        instead: what to use instead.
    """
    return Key(path, Status.REJECTED, default, meaning, instead, kind, _harmless(default, harmless))


def renamed(
    path: str,
    kind: Any,
    default: Any,
    today: str,
    meaning: str,
    *,
    convert: Callable[[Any], Any] | None = None,
) -> Key:
    """An old name of the key `today`: honoured, with a warning that names it."""
    note = f"an old name; use `{today}`"
    return Key(path, Status.HONOURED, default, meaning, note, kind, today=today, convert=convert)


def within(section: Key, keys: Iterable[Key]) -> Iterator[Key]:
    """The row of a section, and those of the keys in it, whose paths are relative to it."""
    yield replace(section, section=True)
    for key in keys:
        path = f"{section.path}.{key.path}"
        yield replace(key, path=path, status=section.status if not key.note else key.status)


def _harmless(default: Any, given: tuple[Any, ...] | None) -> tuple[Any, ...]:
    if given is not None:
        return given
    return (default,) if default is False or default is None else ()
