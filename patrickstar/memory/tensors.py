"""The tensors over chunks, and who refers to them.

On tier 0 tensors over a chunk stay good while it comes and goes, so they are made once and kept. A
*permanent view* (a parameter) may refer to the storage while the chunk is away; any other
reference is somebody who might still read: autograd in the middle of an operator, a recomputed
activation, a view in a local variable. The reference count of the storage is the truth about that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar.memory.chunk import Chunk
from patrickstar.memory.tiers import MemoryTier, Tier


class ChunkTensors:
    """Flat tensors by chunk and tier, and the permanent views of those on tier 0."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}
        self._references: dict[int, int] = {}  # of the storage on tier 0, by permanent views
        self._views: dict[int, weakref.finalize[Any, Any]] = {}
        self._chunk_of_storage: dict[int, int] = {}

    def get(self, chunk: Chunk, tier: int) -> torch.Tensor:
        """The flat tensor over `chunk` on a memory tier."""
        found = self._tensors.get((chunk.id, tier))
        if found is not None:
            return found
        home = self._tiers[tier]
        assert isinstance(home, MemoryTier), "only memory tiers have tensors"
        made = home.tensor(chunk.id, chunk.nbytes, chunk.dtype, chunk.numel)
        if tier == 0:
            storage = made.untyped_storage()
            self._chunk_of_storage[storage._cdata] = chunk.id
            self._references[chunk.id] = _use_count(storage)
        if home.fixed:  # last: it says that everything is there
            self._tensors[chunk.id, tier] = made
        return made

    def forget(self, chunk: int) -> None:
        """The chunk is gone for good."""
        for tier in range(len(self._tiers)):
            tensor = self._tensors.pop((chunk, tier), None)
            if tensor is not None:
                self._chunk_of_storage.pop(tensor.untyped_storage()._cdata, None)
        self._references.pop(chunk, None)

    def chunk_of(self, storage: int) -> int | None:
        """The chunk whose tier-0 storage has this C++ address, if any."""
        return self._chunk_of_storage.get(storage)

    def owns(self, storage: int) -> bool:
        """Whether the storage with this C++ address belongs to a chunk on any tier."""
        return any(tier.owns(storage) for tier in self._tiers if isinstance(tier, MemoryTier))

    def keep_view(self, chunk: Chunk, view: torch.Tensor) -> None:
        """`view` lies in the tier-0 tensor for good, or until it moves to another chunk."""
        self.get(chunk, 0)  # so that its references are counted before the view is
        left = self._views.pop(id(view), None)
        if left is not None:
            left()
        self._references[chunk.id] += 1
        end = weakref.finalize(view, self._view_died, id(view), chunk.id)
        end.atexit = False
        self._views[id(view)] = end

    def drop_view(self, view: torch.Tensor) -> None:
        """`view` lies elsewhere now."""
        left = self._views.get(id(view))
        if left is not None:
            left()

    def views(self, chunk: int) -> list[torch.Tensor]:
        """The permanent views of the chunk that are alive."""
        known = (end.peek() for end in list(self._views.values()))
        return [alive[0] for alive in known if alive is not None and alive[2][1] == chunk]

    def is_referenced(self, chunk: int) -> bool:
        """Whether anything but permanent views refers to the chunk's tier-0 storage."""
        tensor = self._tensors.get((chunk, 0))
        return tensor is not None and (
            _use_count(tensor.untyped_storage()) > self._references[chunk]
        )

    def _view_died(self, view: int, chunk: int) -> None:
        self._views.pop(view, None)
        if chunk in self._references:
            self._references[chunk] -= 1


def _use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))
