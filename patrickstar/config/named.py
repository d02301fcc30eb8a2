"""What ``optimizer`` and ``scheduler`` have in common: a class by name, and its parameters.

Which parameters exist depends on the class, so `patrickstar.optim` checks their names and ranges
where it makes the object. Here they are brought into form: JSON's lists become tuples, "auto"
becomes the default, and those that the table knows have its types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, field_validator

from patrickstar.config.key import Key, Status
from patrickstar.config.types import Section, Str


def _items(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, tuple):
        return value
    if not isinstance(value, dict):
        raise ValueError("an object")
    return tuple((name, _frozen(inner)) for name, inner in value.items())


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def absent(value: Any) -> Any:
    """Turn an empty section, or one whose type is null, into None."""
    if isinstance(value, Mapping) and value.get("type") is None and not value.get("params"):
        return None
    return value


class Named(Section):
    """A class by name, and what to make it with."""

    spellings: ClassVar[tuple[str, ...]] = ()

    type: Str = Field(description="the class")
    given: Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_items)] = Field(
        (), alias="params", description="what it is made with", json_schema_extra={"free": True}
    )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, in a dict of the caller's own; sequences are tuples."""
        return dict(self.given)

    @field_validator("type")
    @classmethod
    def _canonical(cls, name: str) -> str:
        return {one.lower(): one for one in cls.spellings}.get(name.lower(), name)


def parameter(path: str, kind: Any, default: Any, meaning: str, note: str = "") -> Key:
    """A row for a parameter of one or more classes."""
    return Key(path, Status.HONOURED, default, meaning, note, kind)
