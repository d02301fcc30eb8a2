"""What a config says that has no effect here, collected while it is read and told once."""

from __future__ import annotations

import re
import sys
import warnings

_PACKAGE = re.compile(r"patrickstar(\.|$)")


class ConfigWarning(UserWarning):
    """Keys that were understood but do nothing here, and old names of keys."""


class Notes:
    """Remarks about keys of one config, in the order in which they come up."""

    def __init__(self) -> None:
        self._remarks: dict[str, str] = {}

    def add(self, path: str, remark: str) -> None:
        """Remark on the key at `path`; the first remark on a key stays."""
        self._remarks.setdefault(path, remark)

    def tell(self) -> None:
        """Warn of everything at once, if there is anything, where this package was called."""
        if not self._remarks:
            return
        lines = [f"{path}: {remark}" for path, remark in self._remarks.items()]
        text = lines[0] if len(lines) == 1 else "\n  ".join(["the config has remarks:", *lines])
        warnings.warn(ConfigWarning(text), stacklevel=_levels_here())


def _levels_here() -> int:
    """The stack level, for the caller, of the first frame that is not of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _PACKAGE.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level
