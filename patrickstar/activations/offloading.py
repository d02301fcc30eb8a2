"""Activations carried to lower tiers, whoever runs the model.

    offload = patrickstar.offload_activations(memory={"host": "2GiB", "disk": "/scratch"})
    for batch in loader:
        with offload:
            loss = model(batch)
        loss.backward()
        optimizer.step()
    offload.close()

`torch.autograd.graph.saved_tensors_hooks` show every tensor that autograd saves for the backward.
A large one is copied into a chunk of host memory, which goes on to the disk when the budget is
full, and the memory it was in is free as soon as the forward lets go of it. When the backward asks
for it, it is a view of the chunk again: the same bytes, shape and strides, so the same kernels and
the same numbers. It works under plain PyTorch, DDP, FSDP2 and DeepSpeed alike, since all of them
leave to autograd what is saved.

- What is saved is a storage, not a view: the query, key and value that are cut out of one product
  are put away once. Of a storage that is much larger than the view only what the view spans is.
- Parameters and views of them stay where they are, as do small tensors and tensors of other kinds
  (sparse, DTensor, on the meta device). They keep autograd's check that nobody changed them in
  place. What was put away is a copy, which nobody can change.
- Hooks that are active around the context, such as an engine's own, are given whatever stays.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from patrickstar.activations.store import ActivationStore, Stored
from patrickstar.memory import MemoryReport, parse_bytes
from patrickstar.memory.budgets import tiers_of

_CHUNK_MEMORY = "cpu"  # where chunks can be used as they are
_ALIGN = 64  # bytes: where a range of a storage may begin, so that kernels see the same alignment
_SPARSE = 4  # a storage this many times as large as the view is not put away whole

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def offload_activations(
    memory: Mapping[str, Any] | None = None,
    *,
    larger_than: int | str = "1MiB",
    keep: Iterable[torch.Tensor] = (),
) -> ActivationOffloading:
    """A context in which large tensors that autograd saves are put away until the backward.

    Args:
        memory: budgets for what is put away: `{"host": "4GiB", "disk": "/scratch"}`. `disk` takes
            `"PATH"`, `"PATH:SIZE"` or `{"path": ..., "size": ...}`. Without a budget everything
            stays in host memory.
        larger_than: tensors of up to so many bytes stay where they are.
        keep: tensors that stay where they are, with all their views, such as large buffers.

    Raises:
        ConfigError: a key that is not known, or no size.
        SpoolError: the folder for the disk cannot be used.
    """
    return ActivationOffloading(
        ActivationStore(tiers_of(memory or {})), parse_bytes(larger_than), tuple(keep)
    )


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that was put away: which elements of the stored bytes it is."""

    stored: Stored
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that stays, and its version when it was saved."""

    tensor: torch.Tensor
    version: int | None


@dataclass(frozen=True, slots=True)
class _Passed:
    """What the hooks around the context made of a tensor that stays."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


@dataclass(slots=True)
class _Source:
    """A storage, alive or not, and what was put away of it, by the version it had."""

    storage: StorageWeakRef
    stored: list[tuple[int, weakref.ref[Stored]]] = field(default_factory=list)

    def find(self, version: int, start: int, stop: int) -> Stored | None:
        for then, reference in self.stored:
            stored = reference()
            covers = stored is not None and stored.start <= start and stop <= stored.stop
            if covers and then == version:
                return stored
        return None

    def is_over(self) -> bool:
        return self.is_gone() or all(ref() is None for _, ref in self.stored)

    def is_gone(self) -> bool:
        """Whether the storage is; its address may be that of another one then."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class ActivationOffloading:
    """See `offload_activations`, which makes it. It can be entered again and again."""

    def __init__(
        self, store: ActivationStore, threshold: int, keep: tuple[torch.Tensor, ...]
    ) -> None:
        self._store, self._threshold = store, threshold
        self._keep = keep  # so that their storages stay theirs
        self._kept_storages = {tensor.untyped_storage()._cdata for tensor in keep}
        self._sources: dict[int, _Source] = {}
        self._look_through_at = 256
        self._entered: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._lock = threading.Lock()

    def __enter__(self) -> ActivationOffloading:
        around: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self._pack, around), self._unpack
        )
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.pop().__exit__(kind, error, traceback)

    def memory_report(self) -> MemoryReport:
        """Bytes that are put away on every tier, and bytes moved between tiers so far."""
        return self._store.report()

    def close(self) -> None:
        """Give memory and disk back. Closing twice is harmless."""
        self._store.close()

    # What autograd calls

    def _pack(self, around: Hooks | None, tensor: torch.Tensor) -> Any:
        if not self._is_wanted(tensor):
            if around is not None:
                return _Passed(around[0](tensor), around[1])
            # A tensor that knows the node it comes from would keep that node, which keeps it.
            own = tensor if tensor.grad_fn is None else tensor.detach()
            return _Kept(own, None if own.is_inference() else own._version)
        stored = self._store.at(tensor.untyped_storage())
        if stored is None:
            with self._lock:
                stored = self._put(tensor)
            first = stored.start // tensor.itemsize
        else:
            first = 0  # a view of a chunk that the backward was given, and saves again
        return _View(
            stored,
            tensor.device,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()) - first,
        )

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _Passed:
            return packed.unpack(packed.packed)
        if type(packed) is _Kept:
            if packed.version is not None and packed.tensor._version != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(packed.tensor.shape)} that the backward needs was "
                    "changed in place after the forward saved it; change a copy, or run the "
                    "forward again"
                )
            return packed.tensor
        view: _View = packed
        flat = self._store.get(view.stored)
        if view.device.type != _CHUNK_MEMORY:
            flat = torch.empty_like(flat, device=view.device).copy_(flat)
        made = torch.empty(0, dtype=view.dtype, device=view.device)
        return made.set_(flat.untyped_storage(), view.offset, view.shape, view.stride)

    # Inside

    def _is_wanted(self, tensor: torch.Tensor) -> bool:
        # Parameters first: what an engine makes of them may move chunks when it is asked anything.
        if type(tensor) is not torch.Tensor or isinstance(tensor._base, torch.nn.Parameter):
            return False
        return (
            tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and min(tensor.nbytes, tensor.untyped_storage().nbytes()) > self._threshold
            and not tensor.is_inference()
            and not tensor.is_quantized
            and not tensor.is_conj()
            and not tensor.is_neg()
            and tensor.untyped_storage()._cdata not in self._kept_storages
        )

    def _put(self, tensor: torch.Tensor) -> Stored:
        """What has the bytes of `tensor`, which may have been put away before."""
        storage = tensor.untyped_storage()
        start, stop = _span(tensor)
        if storage.nbytes() <= _SPARSE * tensor.nbytes:
            start, stop = 0, storage.nbytes()
        source = self._sources.get(storage._cdata)
        if source is None or source.is_gone():
            if len(self._sources) >= self._look_through_at:
                self._look_through()
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            source = self._sources[storage._cdata] = _Source(weak)
        version = tensor._version
        found = source.find(version, start, stop)
        if found is None:
            found = self._store.put(_bytes(storage, start, stop), start)
            source.stored.append((version, weakref.ref(found)))
        return found

    def _look_through(self) -> None:
        """Forget storages that are gone, or of which nothing is put away any more."""
        over = [key for key, source in self._sources.items() if source.is_over()]
        for key in over:
            del self._sources[key]
        self._look_through_at = max(256, 2 * len(self._sources))


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that `tensor` reaches, from a multiple of `_ALIGN` on."""
    size, first = tensor.itemsize, int(tensor.storage_offset()) * tensor.itemsize
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return first // _ALIGN * _ALIGN, first + int(reach) * size


def _bytes(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    """Bytes `start` to `stop` of `storage` as a flat uint8 tensor over it."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (stop - start,), (1,))
