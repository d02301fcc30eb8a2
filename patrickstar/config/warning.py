"""The warning category of everything a config says that has no effect here."""

from __future__ import annotations


class ConfigWarning(UserWarning):
    """A key was understood and accepted, but does nothing here, or is an old name."""
