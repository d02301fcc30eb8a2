"""What checkpointed regions keep, in chunks: `activation_checkpointing.cpu_checkpointing`.

A region that is computed again in the backward (`torch.utils.checkpoint`, both kinds) keeps its
inputs until then. They are the last activations that grow with the depth of a model. Here each is
copied into a chunk on the host as the region saves it, and its memory on the device is free when
the forward lets go of it. When the backward comes to the region, the chunk is brought to the device
like any other: inside the budgets, ahead of its use where that is planned, and by way of the disk
where the host is full. The copy has the bytes and strides of the input, so no number changes.

A saved tensor is known to be such an input by who saves it, which is `torch.utils.checkpoint`. All
other saved tensors stay where they are, and so do small inputs and those of kinds that a chunk
cannot hold.

The same chunks serve in every iteration, in the same order, so iterations repeat and can be
planned. Whoever holds an `AwayView` keeps its bytes; the last reference may go at any time, so it
only notes the chunk as dead, and the next call gives its contents up.
"""

from __future__ import annotations

import heapq
import sys
import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from patrickstar.engine.construct import is_dense
from patrickstar.memory import Access, Chunk, ChunkManager, Use

_SMALLEST = 4096  # bytes; less is not worth a chunk
_PAGE = 4096
_SAVES = "torch.utils.checkpoint"


class Away:
    """Bytes in a chunk."""

    __slots__ = ("__weakref__", "chunk")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk


@dataclass(frozen=True, slots=True)
class AwayView:
    """A saved tensor whose bytes lie in a chunk."""

    away: Away
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class RegionInputs:
    """Puts away what regions of one run save.

    Args:
        manager: has the chunks.
        host: the number of the tier that they are put on.
    """

    def __init__(self, manager: ChunkManager, host: int) -> None:
        self._manager, self._host = manager, host
        self._free: dict[int, list[int]] = {}  # chunks without contents, by bytes: heaps
        self._alive: dict[int, weakref.ref[Away]] = {}  # by chunk
        self._known: dict[tuple[object, ...], tuple[StorageWeakRef, weakref.ref[Away]]] = {}
        self._dead: deque[int] = deque()

    def wants(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, which the caller's caller saves, is an input to put away."""
        return (
            type(tensor) is torch.Tensor
            and _is_saved_by_a_region()
            and tensor.nbytes >= _SMALLEST
            and not tensor.is_inference()
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and is_dense(tensor)
        )

    def put(self, tensor: torch.Tensor) -> AwayView:
        """Copy `tensor` into a chunk; the same tensor is copied once.

        Raises:
            BudgetError: there is no room for it beside what cannot leave.
        """
        storage, shape, stride = tensor.untyped_storage(), tensor.shape, tensor.stride()
        place = (storage._cdata, tensor._version, tensor.storage_offset())
        key = (*place, shape, stride, tensor.dtype)
        source, reference = self._known.get(key, (None, None))
        away = None if reference is None else reference()
        if away is None or source is None or source.expired():  # type: ignore[no-untyped-call]
            away = self._copy(tensor)
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._known[key] = (weak, weakref.ref(away))
        return AwayView(away, tensor.dtype, shape, stride, 0)

    def view(self, chunk: int, tensor: torch.Tensor) -> AwayView | None:
        """`tensor`, which lies in `chunk` and is saved again, if it was put away here."""
        reference = self._alive.get(chunk)
        away = None if reference is None else reference()
        if away is None:
            return None
        return AwayView(
            away, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def get(self, view: AwayView) -> torch.Tensor:
        """The tensor on the device; its chunk stays there while something refers to it."""
        self.tidy()
        chunk = view.away.chunk
        self._manager.access((Use(chunk.id, Access.READ),))
        storage = self._manager.tensor(chunk).untyped_storage()
        made = torch.empty(0, dtype=view.dtype, device=storage.device)
        return made.set_(storage, view.offset, view.shape, view.stride)

    def tidy(self) -> None:
        """Give up what nobody needs any more."""
        while self._dead:
            chunk = self._manager.chunk(self._dead.popleft())
            del self._alive[chunk.id]
            self._manager.release(chunk)
            heapq.heappush(self._free.setdefault(chunk.nbytes, []), chunk.id)
        gone = [key for key, (_, reference) in self._known.items() if reference() is None]
        for key in gone:
            del self._known[key]

    # Inside

    def _copy(self, tensor: torch.Tensor) -> Away:
        self.tidy()
        chunk = self._take(-(-tensor.nbytes // _PAGE) * _PAGE)
        with self._manager.use((Use(chunk.id, Access.OVERWRITE, self._host),)):
            storage = self._manager.tensor(chunk, self._host).untyped_storage()
            made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            made.set_(storage, 0, tensor.shape, tensor.stride()).copy_(tensor)
        away = Away(chunk)
        self._alive[chunk.id] = weakref.ref(away)
        weakref.finalize(away, self._dead.append, chunk.id).atexit = False
        return away

    def _take(self, nbytes: int) -> Chunk:
        """The first chunk of its size that is free, so that every iteration uses the same."""
        free = self._free.get(nbytes, [])
        for number in sorted(free):
            chunk = self._manager.chunk(number)
            if not self._manager.is_referenced(chunk):
                free.remove(number)
                heapq.heapify(free)
                return chunk
        return self._manager.create(nbytes, torch.uint8, "activation")


def _is_saved_by_a_region() -> bool:
    """Whether it is checkpointing that made autograd save something.

    That is a function of its module, or one of its autograd functions while it is applied.
    """
    frame = sys._getframe(3)  # past this function, `wants` and the hook
    if frame.f_globals.get("__name__") == _SAVES:
        return True
    applied = frame.f_code is torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return applied and getattr(frame.f_locals.get("cls"), "__module__", "") == _SAVES
