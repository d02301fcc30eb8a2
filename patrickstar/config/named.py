"""Sections that name a class and its parameters: ``optimizer`` and ``scheduler``.

Which parameters exist depends on the class, so `patrickstar.optim` checks them where it makes the
object; here they are only normalised: JSON's lists become tuples and "auto" becomes the default.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from patrickstar.config.key import honoured
from patrickstar.config.types import Section, Str


def _items(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return tuple((name, _frozen(inner)) for name, inner in value.items())


def _frozen(value: Any) -> Any:
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value


class Named(Section):
    """A class by name, and what to make it with."""

    type: Str = honoured(..., "the class")
    given: Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_items)] = Field(
        (), alias="params", description="its parameters"
    )

    @property
    def params(self) -> dict[str, Any]:
        """The parameters, in a dict of the caller's own."""
        return dict(self.given)
