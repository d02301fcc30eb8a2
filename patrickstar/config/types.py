"""Types of config values, as strict as JSON lets them be.

JSON has one number type, and DeepSpeed users write ``5e8`` for a count: `Int` takes a float without
a fraction. Nothing else is converted: a string is no number and 1 is no boolean, because a value
that was guessed is a run that was not asked for. Messages say what is expected; the key path and
the value are added where the error is told (`patrickstar.config.explain`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

DTypeName = Literal["fp32", "fp16", "bf16"]

_SPELLINGS: dict[DTypeName, tuple[str, ...]] = {
    "fp32": ("fp32", "float32", "float"),
    "fp16": ("fp16", "float16", "half"),
    "bf16": ("bf16", "bfloat16"),
}
_DTYPES = {name: dtype for dtype, names in _SPELLINGS.items() for name in names}


class Section(BaseModel):
    """An object of the config: frozen, and without room for keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


def _int(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("an integer")
    if abs(value) >= 2**63:
        raise ValueError("an integer of at most 64 bits")
    return value


def _float(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _bool(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _str(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a string")
    return value


def _dtype(value: Any) -> Any:
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else ""
    if name not in _DTYPES:
        raise ValueError('"fp32", "fp16" or "bf16"')
    return _DTYPES[name]


def _folder(value: Any) -> Any:
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError("the path of a folder")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # of "~somebody" who is unknown here
        raise ValueError("the path of a folder") from error


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


Int = Annotated[int, BeforeValidator(_int)]
PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
Float = Annotated[float, BeforeValidator(_float)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Bool = Annotated[bool, BeforeValidator(_bool)]
Str = Annotated[str, BeforeValidator(_str)]
Folder = Annotated[Path, BeforeValidator(_folder)]
DType = Annotated[DTypeName, BeforeValidator(_dtype)]
Upper = BeforeValidator(_upper)
