"""Byte sizes as people write them.

`"1.5GiB"` is binary, `"1.5GB"` decimal, a bare number is bytes, and then a whole one. Anything else
is refused with the value named, since a budget that was misread is a budget that will be broken.
"""

from __future__ import annotations

import re

from patrickstar.errors import ConfigError

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_IMPLAUSIBLE = 64 << 10  # bytes; a budget below this is more likely a size without its unit
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | float | str) -> int:
    """Return `size` in bytes.

    Args:
        size: a number of bytes, or a string such as `"8GiB"`, `"500MB"`, `"1.5 GiB"` or `"4096"`.

    Raises:
        ConfigError: the string is no size, the unit is unknown or left out where only one can make
            it a size, or the size is negative.
    """
    if isinstance(size, bool) or not isinstance(size, int | float | str):
        raise ConfigError(f"{size!r} is not a size; write bytes or a string such as '1.5GiB'")
    if isinstance(size, int | float):
        if size < 0 or size != size or size == float("inf"):
            raise ConfigError(f"a size cannot be {size}; write bytes or a string such as '1.5GiB'")
        if size != int(size):
            raise _without_unit(str(size))
        return int(size)
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError(f"{size!r} is not a size; write bytes or a string such as '1.5GiB'")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower() or "b")
    if factor is None:
        raise ConfigError(
            f"{size!r} has the unknown unit {unit!r}; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB"
        )
    if factor == 1 and float(number) != int(float(number)):
        raise _without_unit(number)
    return int(float(number) * factor) if "." in number else int(number) * factor


def _without_unit(number: str) -> ConfigError:
    return ConfigError(
        f"{number!r} without a unit is that many bytes, which is no size; name the unit: "
        f"'{number}GiB', '{number}MiB' or '{number}KiB'"
    )


def format_bytes(size: int) -> str:
    """Return `size` bytes for people, for example `"1.50 GiB"`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_budget(budget: int) -> str:
    """A budget that is refused, for people; one that lost its unit on the way is asked about."""
    shown = format_bytes(budget)
    if not 0 < budget < _IMPLAUSIBLE:
        return shown
    unit = "GiB" if budget < 1024 else "MiB"
    return f"{shown} (did you mean {budget}{unit}?)"


def size_at_least(size: int) -> str:
    """`size` bytes as one types them, rounded up to a hundredth: for example `"1.51GiB"`."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= unit:
            hundredths = -(-100 * size // unit)
            return f"{hundredths // 100}.{hundredths % 100:02}{name}"
    return f"{size}B"
