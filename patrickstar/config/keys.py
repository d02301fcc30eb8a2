"""The one table of every key: DeepSpeed 0.19.8's, at every level, our own, and old names.

It is put together from the fields of the models and from each concern's ``OTHER_KEYS``, so no key
is declared twice. What is checked, what errors suggest, and ``docs/deepspeed-config.md`` come from
it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from patrickstar.config import (
    activation_checkpointing,
    checkpoint,
    communication,
    data,
    legacy,
    machinery,
    monitor,
    optimizer,
    parallelism,
    precision,
    removed,
    reporting,
    scheduler,
    zero,
)
from patrickstar.config.key import UNSET, Key, Status
from patrickstar.config.model import Config
from patrickstar.config.types import Section

_OURS = "patrickstar"


def _fields(model: type[Section], parent: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{parent}.{field.alias or name}" if parent else field.alias or name
        inner = _model_of(field)
        extra: Mapping[str, Any] = (
            field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        )
        default, ours = _default(field, extra), UNSET
        if path == _OURS or path.startswith(f"{_OURS}."):
            default, ours = ours, default
        yield Key(
            path,
            Status.HONOURED,
            default,
            field.description or "",
            extra.get("note", ""),
            section=inner is not None or bool(extra.get("free")),
            free=bool(extra.get("free")),
            ours=ours,
        )
        if inner is not None:
            yield from _fields(inner, path)


def _model_of(field: FieldInfo) -> type[Section] | None:
    """The model of a field that holds a section, or may hold one."""
    for one in (field.annotation, *get_args(field.annotation)):
        if isinstance(one, type) and issubclass(one, Section):
            return one
    return None


def _default(field: FieldInfo, extra: Mapping[str, Any]) -> Any:
    default = extra.get("deepspeed", field.default)
    if isinstance(default, Section) or extra.get("free"):
        return {}
    return UNSET if default is PydanticUndefined else default


def _table() -> dict[str, Key]:
    table: dict[str, Key] = {}
    for keys in (
        _fields(Config, ""),
        optimizer.OTHER_KEYS,
        scheduler.OTHER_KEYS,
        precision.OTHER_KEYS,
        communication.OTHER_KEYS,
        zero.OTHER_KEYS,
        activation_checkpointing.OTHER_KEYS,
        checkpoint.OTHER_KEYS,
        data.OTHER_KEYS,
        reporting.OTHER_KEYS,
        monitor.OTHER_KEYS,
        machinery.OTHER_KEYS,
        parallelism.OTHER_KEYS,
        removed.OTHER_KEYS,
        legacy.OTHER_KEYS,
    ):
        for key in keys:
            assert key.path not in table, f"{key.path} is declared twice"
            table[key.path] = key
    return table


TABLE: Mapping[str, Key] = MappingProxyType(_table())
"""Every key by its path."""


def keys_in(section: str) -> list[Key]:
    """The rows of one section, in order; of the top level for an empty path."""
    return [key for key in TABLE.values() if key.parent == section]


def unknown(path: str) -> str:
    """What to say about a key that is not in the table: the nearest right one, and where else."""
    parent, _, name = path.rpartition(".")
    lowered = name.lower()
    here = {
        key.name.lower(): key
        for key in keys_in(parent)
        if not key.today and not (key.status is Status.REJECTED and key.note)
    }
    words = lowered.split("_")
    whole = [one for one in here if all(word in one.replace("_", "") for word in words)]
    near = difflib.get_close_matches(lowered, whole if len(words) > 1 else [], n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(lowered, here, n=1)
    elsewhere = [
        key.path
        for key in TABLE.values()
        if key.name.lower() == lowered and key.parent != parent and not _inert(key)
    ]
    where = f"in {parent}" if parent else "at the top level"
    text = f"there is no key {name!r} {where}"
    if near:
        text += f"; did you mean {here[near[0]].path!r}?"
    elif not elsewhere:
        names = sorted(key.name for key in here.values())
        text += f"; the keys {where} are {', '.join(names)}"
    if elsewhere:
        places = " and ".join(
            f"{one!r}" if "." in one else f"{one!r} at the top level" for one in elsewhere[:3]
        )
        text += f"{' There is' if near else '; there is'} {places}"
    return text


def _inert(key: Key) -> bool:
    """Whether suggesting `key` would lead nowhere."""
    return key.status is Status.REJECTED or bool(key.today)
