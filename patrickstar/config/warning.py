"""What a config says that has no effect here, collected while it is read and told once."""

from __future__ import annotations

import warnings


class ConfigWarning(UserWarning):
    """Keys that were understood but do nothing here, and old names of keys."""


class Notes:
    """Remarks about keys of one config, in the order in which they come up."""

    def __init__(self) -> None:
        self._remarks: dict[str, str] = {}

    def add(self, path: str, remark: str) -> None:
        """Remark on the key at `path`; the first remark on a key stays."""
        self._remarks.setdefault(path, remark)

    def tell(self, stacklevel: int) -> None:
        """Warn of everything at once, if there is anything.

        Args:
            stacklevel: as in `warnings.warn`, counted from the caller.
        """
        if not self._remarks:
            return
        lines = [f"{path}: {remark}" for path, remark in self._remarks.items()]
        text = lines[0] if len(lines) == 1 else "\n  ".join(["the config has remarks:", *lines])
        warnings.warn(ConfigWarning(text), stacklevel=stacklevel + 1)
