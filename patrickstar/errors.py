"""Every error a user can meet, in one place.

An error says what happened, which value it happened with, and what to do about it. All of them are
`PatrickStarError`, so a caller can catch the family; each is also the built-in exception that a
reader of the traceback would expect.
"""

from __future__ import annotations


class PatrickStarError(Exception):
    """Base class of all errors raised on purpose by PatrickStar."""


class ConfigError(PatrickStarError, ValueError):
    """A configuration value is unknown, misspelt, of the wrong type, or contradicts another."""


class BudgetError(PatrickStarError, MemoryError):
    """A memory budget cannot be kept.

    Attributes:
        tier: the tier whose budget is too small ("device", "host" or "disk").
        budget: that budget, in bytes.
        smallest: the smallest budget of that tier that would work, in bytes, as far as it is known.
    """

    def __init__(self, message: str, *, tier: str, budget: int, smallest: int) -> None:
        super().__init__(message)
        self.tier = tier
        self.budget = budget
        self.smallest = smallest


class SpoolError(PatrickStarError, OSError):
    """The disk tier failed: its path is unusable, the disk is full, or an I/O came back short."""


class DataError(PatrickStarError, ValueError):
    """Training data or a batch is missing or unusable."""


class CheckpointError(PatrickStarError, ValueError):
    """A checkpoint is missing, incomplete, corrupted, or does not fit the model."""


class ChunkStateError(PatrickStarError, RuntimeError):
    """A chunk was asked for a transition that its state does not allow."""
