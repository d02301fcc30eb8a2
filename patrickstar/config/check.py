"""Holding a config against the table: what is unknown, refused, without effect, or an old name.

The result has only keys that are honoured, under today's names, ready for the models.
"""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from patrickstar.config.explain import expected_by, wrong
from patrickstar.config.key import Key, Status
from patrickstar.config.keys import TABLE, unknown
from patrickstar.config.warning import Notes
from patrickstar.errors import ConfigError

_OURS = "patrickstar"
_AUTO = "auto"


def check(raw: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """Return what is honoured of `raw`; remark in `notes` on what has no effect.

    Args:
        raw: from `patrickstar.config.source.read`; it is left as it is.
        notes: takes the remarks.

    Raises:
        ConfigError: of everything that is unknown, refused, or of a wrong type in what is not
            honoured; the models check the rest.
    """
    walk = _Walk(notes)
    kept = walk.section(raw, "", free=False)
    walk.move_old_names(kept)
    if walk.problems:
        raise ConfigError("\n".join(walk.problems))
    return kept


class _Walk:
    """One walk through a config, with what it found."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.problems: list[str] = []
        self._old: list[tuple[Key, Any]] = []

    def section(self, given: dict[str, Any], path: str, *, free: bool) -> dict[str, Any]:
        """What is honoured of the object at `path`."""
        kept: dict[str, Any] = {}
        for name, value in given.items():
            here = f"{path}.{name}" if path else name
            key = TABLE.get(here)
            if key is None:
                if free:
                    if value != _AUTO:
                        kept[name] = value
                else:
                    self.problems.append(unknown(here))
            elif _is_auto(key, value):
                continue
            elif key.status is not Status.HONOURED:
                self._unheard(key, value)
            elif key.section and isinstance(value, dict):
                kept[name] = self.section(value, here, free=key.free)
            elif key.today:
                self._old.append((key, value))
            else:
                kept[name] = self._typed(key, value)
        return kept

    def move_old_names(self, kept: dict[str, Any]) -> None:
        """Put the values of old names under today's."""
        for key, value in self._old:
            before = len(self.problems)
            value = self._typed(key, value)
            if len(self.problems) > before or value is None:
                continue
            value = value if key.convert is None else key.convert(value)
            self.notes.add(key.path, key.note)
            self._put(kept, key, value)

    def _put(self, kept: dict[str, Any], key: Key, value: Any) -> None:
        *sections, name = key.today.split(".")
        here = kept
        for part in sections:
            inner = here.setdefault(part, {})
            if inner is None:
                inner = here[part] = {}
            if not isinstance(inner, dict):
                return  # the models will say what is wrong with it
            here = inner
        if name in here and here[name] != value:
            self.problems.append(
                f"{key.path} and {key.today} are both given; the first is an old name of the "
                "second, delete it"
            )
        here[name] = value

    def _unheard(self, key: Key, value: Any, *, remark: bool = True) -> None:
        """A key that is accepted or rejected."""
        if remark and key.note and self._asks(key, value):
            if key.status is Status.REJECTED:
                self.problems.append(f"{key.path} is not supported: {key.note}")
                return
            self.notes.add(key.path, f"has no effect here: {key.note}")
        if key.section and isinstance(value, dict):
            on = remark and _switched_on(key, value)
            for name, inner in value.items():
                row = TABLE.get(f"{key.path}.{name}")
                if row is not None and not _is_auto(row, inner):
                    self._unheard(row, inner, remark=on)
                elif row is None and not key.free:
                    self.problems.append(unknown(f"{key.path}.{name}"))
        elif key.section and value is not None and not key.asks_for_nothing(value):
            if not key.free:
                self.problems.append(wrong(key.path, value, "an object"))
        else:
            self._typed(key, value)

    def _asks(self, key: Key, value: Any) -> bool:
        """Whether `value` asks for something that it does not get."""
        if key.asks_for_nothing(value):
            return False
        if not key.section or not isinstance(value, dict):
            return value is not None or not key.section
        if key.switch is not None or key.status is Status.REJECTED:
            return _switched_on(key, value)
        rows = ((TABLE.get(f"{key.path}.{name}"), inner) for name, inner in value.items())
        return any(
            key.free if row is None else not row.note and self._asks(row, inner)
            for row, inner in rows
        )

    def _typed(self, key: Key, value: Any) -> Any:
        """`value` in the type that the table says, where it says one."""
        if key.kind is Any or key.asks_for_nothing(value):
            return value
        try:
            return _adapter(key.kind).validate_python(value)
        except ValidationError as error:
            expected = expected_by(one for one in error.errors() if len(one["loc"]) <= 1)
            self.problems.append(wrong(key.path, value, expected or "another value"))
            return value


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))


def _is_auto(key: Key, value: Any) -> bool:
    """Whether `value` leaves the choice to DeepSpeed's default; our own keys have their "auto"."""
    return (
        isinstance(value, str)
        and value == _AUTO
        and key.path != _OURS
        and not key.path.startswith(f"{_OURS}.")
    )


def _switched_on(key: Key, value: dict[str, Any]) -> bool:
    if key.switch is None:
        return True
    name, default = key.switch
    return value.get(name, default) not in (False, _AUTO)
