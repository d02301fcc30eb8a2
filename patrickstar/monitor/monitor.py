"""Numbers of a run, handed to whatever writes them.

A number is an event: its name, its value and how many samples had been trained on. Names are
DeepSpeed's, "Train/Samples/lr" for example, so that dashboards made for its runs show these too.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from patrickstar.errors import ConfigError

Event = tuple[str, float, int]
"""Name, value, samples so far."""


class Writer(Protocol):
    """Puts events somewhere."""

    def write_events(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Hands every event to all `writers`; without one it does nothing."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = list(writers)

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return bool(self._writers)

    def write_events(self, events: Sequence[Event]) -> None:
        """Write `events`, whose samples must not be fewer than those of earlier ones.

        Raises:
            PatrickStarError: a file cannot be written any more.
        """
        for writer in self._writers:
            writer.write_events(events)

    def close(self) -> None:
        """Finish what is written. Closing twice is harmless."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()


def needed(module: str, key: str, extra: str) -> ModuleType:
    """The library `module`, which the config asks for with `key`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}.enabled is true, but the library it needs cannot be imported ({error}); "
            f"pip install 'patrickstar[{extra}]', or set {key}.enabled to false"
        ) from error
