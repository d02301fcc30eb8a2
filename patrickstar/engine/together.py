"""Saving with several ranks: all of them read, the first one writes.

What is read may be sharded, and then has to be gathered by all ranks at the same time. So they all
walk over the same tensors in the same order, and a checkpoint does not show how many they were. If
the first rank cannot write, the walk goes on to its end, so that nobody waits for it, and all ranks
raise the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.engine.ranks import Ranks
from patrickstar.errors import CheckpointError

Part = Callable[[], AbstractContextManager[torch.Tensor]]
"""Has a part of a tensor inside the context."""


class Walk:
    """Parts of tensors, read once each and in order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._read = 0

    def source(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[Part]
    ) -> TensorSource:
        """The next tensor of the walk."""
        self._parts += parts

        def contents() -> Iterator[torch.Tensor]:
            for part in parts:
                self._read += 1
                with part() as values:
                    yield values
                del values

        return TensorSource(name, dtype, shape, contents)

    def finish(self) -> None:
        """Read what has not been read."""
        for part in self._parts[self._read :]:
            self._read += 1
            with part():
                pass


def write_together(ranks: Ranks | None, walk: Walk, write: Callable[[], None]) -> None:
    """Call `write`, which reads the walk, on the first rank; called on all ranks.

    Raises:
        CheckpointError: it could not be written, on every rank.
    """
    if ranks is None:
        write()
        return
    failure: Exception | None = None
    if ranks.comm.rank == ranks.comm.topology.ranks[0]:
        try:
            write()
        except Exception as error:
            failure = error
    walk.finish()
    told = "" if failure is None else str(failure) or type(failure).__name__
    texts = ranks.comm.control.exchange_bytes("the outcome of saving", told.encode())
    if failure is not None:
        raise failure
    if texts[0]:
        raise CheckpointError(f"the first rank could not save: {texts[0].decode()}")
