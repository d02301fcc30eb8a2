"""Bytes that are put away in chunks, first in, last out.

What the forward saved first the backward needs last, so when memory is short the oldest bytes leave
for the disk, and while bytes are being used those that were put away just before them are read.

Whoever holds a `Stored` keeps its bytes. The last reference may go at any time and on any thread:
in the middle of a backward, in a collection of garbage, or while the memory manager is at work,
which is for one caller at a time. So it only notes the chunk as dead, and whoever has the lock, or
can have it at once, gives the memory up.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from patrickstar.errors import ChunkStateError
from patrickstar.memory import (
    Access,
    Candidate,
    Chunk,
    ChunkManager,
    MemoryReport,
    Tier,
    Use,
)

_PAGE = 4096
_AHEAD = 2  # how many are read before they are asked for
_MOST_FREE = 256  # chunks without contents that are kept for the next bytes of their size


class Stored:
    """Bytes that were put away.

    Attributes:
        chunk: where they are.
        number: how many were put away before.
        start, stop: which bytes of their source they are.
    """

    __slots__ = ("__weakref__", "chunk", "number", "start", "stop")

    def __init__(self, chunk: Chunk, number: int, start: int, stop: int) -> None:
        self.chunk, self.number = chunk, number
        self.start, self.stop = start, stop


class _OldestFirst:
    """The policy: what was put away first is needed last."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers

    def choose(self, candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda candidate: self._numbers.get(candidate.chunk, -1))


class ActivationStore:
    """Chunks of bytes over `tiers`."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._numbers: dict[int, int] = {}  # of the chunks in use, in the order of the numbers
        self._manager = ChunkManager(tiers, policy=_OldestFirst(self._numbers), plan=False)
        self._stored: weakref.WeakValueDictionary[int, Stored] = weakref.WeakValueDictionary()
        self._count = itertools.count()
        self._free: dict[int, list[Chunk]] = {}
        self._dead: deque[Chunk] = deque()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._close = weakref.finalize(self, self._manager.close)
        self._close.atexit = False

    def put(self, source: torch.Tensor, start: int) -> Stored:
        """Copy the flat uint8 tensor `source`, which begins at byte `start` of what it is from.

        Raises:
            BudgetError: it does not fit beside what cannot leave.
        """
        nbytes = source.numel()
        with self._alone():
            chunk = self._take(-(-max(nbytes, 1) // _PAGE) * _PAGE)
            number = next(self._count)
            self._numbers[chunk.id] = number
            try:
                with self._manager.use((Use(chunk.id, Access.OVERWRITE),)):
                    self._manager.tensor(chunk)[:nbytes].copy_(source)
            except BaseException:
                self._give_up(chunk)
                raise
            made = Stored(chunk, number, start, start + nbytes)
            self._stored[chunk.id] = made
            end = weakref.finalize(made, self._died, chunk)
            end.atexit = False
            return made

    def get(self, stored: Stored) -> torch.Tensor:
        """The bytes as a flat uint8 tensor; they stay while something refers to its storage.

        Raises:
            ChunkStateError: the store is closed.
        """
        with self._alone():
            self._manager.access((Use(stored.chunk.id, Access.READ),))
            # A view of its own, since that is what keeps the chunk from leaving.
            found = self._manager.tensor(stored.chunk)[: stored.stop - stored.start]
            ahead = (c for c, n in reversed(self._numbers.items()) if n < stored.number)
            for chunk in itertools.islice(ahead, _AHEAD):
                if not self._manager.ledger.is_valid(chunk, 0):
                    self._manager.prefetch(self._manager.chunk(chunk))
            return found

    def at(self, storage: torch.UntypedStorage) -> Stored | None:
        """What `storage`, which `get` may have given out, has the bytes of."""
        chunk = self._manager.chunk_of(storage._cdata)
        return None if chunk is None else self._stored.get(chunk)

    def report(self) -> MemoryReport:
        """Bytes by tier, and bytes moved between tiers so far."""
        with self._alone():
            return self._manager.report()

    def close(self) -> None:
        """Give everything back. Closing twice is harmless."""
        with self._lock:
            self._close()

    # Inside

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Use the manager, which is for one caller at a time."""
        try:
            with self._lock:
                if not self._close.alive:
                    raise ChunkStateError(
                        "the offloading of activations is closed; run backward passes before "
                        "closing it, or make another with offload_activations"
                    )
                self._bury()
                yield
        finally:
            self._bury_if_alone()

    def _take(self, nbytes: int) -> Chunk:
        """A chunk without contents. One that was used before has its pages still."""
        free = self._free.get(nbytes, [])
        for index, chunk in enumerate(free):
            if not self._manager.is_referenced(chunk):
                return free.pop(index)
        return self._manager.create(nbytes, torch.uint8, "activation")

    def _died(self, chunk: Chunk) -> None:
        self._dead.append(chunk)
        self._bury_if_alone()

    def _bury_if_alone(self) -> None:
        # Whoever has the lock now will come here after giving it back.
        while self._dead and os.getpid() == self._process and self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    def _bury(self) -> None:
        while self._dead:
            chunk = self._dead.popleft()
            if self._close.alive:
                self._give_up(chunk)

    def _give_up(self, chunk: Chunk) -> None:
        """The contents are not needed any more. A tensor that refers to them keeps them."""
        self._numbers.pop(chunk.id, None)
        self._manager.release(chunk)
        self._free.setdefault(chunk.nbytes, []).append(chunk)
        if sum(map(len, self._free.values())) > _MOST_FREE:
            self._delete_free()

    def _delete_free(self) -> None:
        """Batches of ever new shapes leave chunks behind that nobody will ask for."""
        for nbytes, chunks in list(self._free.items()):
            self._free[nbytes] = [c for c in chunks if self._manager.is_referenced(c)]
            for chunk in chunks:
                if chunk not in self._free[nbytes]:
                    self._manager.delete(chunk)
            if not self._free[nbytes]:
                del self._free[nbytes]
