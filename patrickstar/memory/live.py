"""Memory that no chunk owns, measured while operators run.

Under this mode every operator's new storages are counted until they die, which is exact to the
byte for tensors. What operators are given and only look at (a batch, a view of the user's data) is
no memory of the iteration. Before an operator runs, the size of what it will make is worked out on
the meta device, so that room can be made first: an iteration that was never traced stays inside its
budget too. It costs some tens of microseconds per operator and is on only while an iteration is
traced.

Kernels' own scratch memory is not seen; budgets on a CPU allow for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class LiveStorages:
    """Bytes of the storages that are alive, apart from those that `is_managed`.

    Args:
        is_managed: whether the storage with this address of its C++ object belongs to a chunk.
        device_type: which storages count ("cpu", "cuda", ...).
    """

    def __init__(self, is_managed: Callable[[int], bool], device_type: str) -> None:
        self.nbytes = 0
        self._is_managed = is_managed
        self._device_type = device_type
        self._seen: dict[int, int] = {}

    def add(self, tensor: torch.Tensor, known: Collection[int] = ()) -> None:
        """Count the storages under `tensor` until they die, but for those that are `known`."""
        if tensor.device.type == self._device_type:
            for part in strided_parts(tensor):
                self._add(part, known)

    def _add(self, part: torch.Tensor, known: Collection[int]) -> None:
        storage = part.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in known or self._is_managed(key):
            return
        nbytes = storage.nbytes()
        # First, so that nothing is counted for good if this is interrupted in between.
        weakref.finalize(storage, self._forget, key).atexit = False
        self._seen[key] = nbytes
        self.nbytes += nbytes

    def recount(self) -> None:
        """Make the sum right, should an interrupt have come between two lines."""
        self.nbytes = sum(self._seen.values())

    def _forget(self, key: int) -> None:
        self.nbytes -= self._seen.pop(key, 0)


class WatchOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `before(nbytes)` ahead of an operator that will allocate, and `after()` behind it."""

    def __init__(
        self, live: LiveStorages, before: Callable[[int], None], after: Callable[[], None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live
        self._before = before
        self._after = after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "prim":  # a question, such as for a tensor's device
            result = func(*args, **kwargs)
        else:
            self._before(self.made(func, args, kwargs))
            result = func(*args, **kwargs)
            # What it was given is somebody else's, the data of a whole run perhaps.
            given = _storages((args, kwargs))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._live.add(leaf, given)
        self._after()
        return result

    def made(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes of the tensors that an operator will return, without those it was given."""
        return bytes_made(func, args, kwargs)


def _storages(tree: Any) -> frozenset[int]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return frozenset(p.untyped_storage()._cdata for t in tensors for p in strided_parts(t))


def bytes_made(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes of the tensors that `func` will return, without those it was given."""
    returns = [r for r in func._schema.returns if r.alias_info is None]
    if not returns:
        return 0  # works in place
    if func is torch.ops.aten._to_dense.default:  # no meta kernel, and far more than went in
        return int(args[0].numel() * args[0].element_size())
    try:
        inputs = tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
        inputs[1].update({"device": "meta"} if "device" in inputs[1] else {})
        made = func(*inputs[0], **inputs[1])
    except Exception:
        # No meta kernel, or a size that depends on the data: take what went in as the measure.
        return _bytes_of((args, kwargs))
    return _bytes_of(made)


def _bytes_of(tree: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return sum(part.nbytes for tensor in tensors for part in strided_parts(tensor))


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The ordinary tensors that `tensor` is made of: itself, or indices and values if sparse."""
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor,)
    if layout is torch.sparse_coo:
        return (tensor._indices(), tensor._values())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()  # opaque to us, such as oneDNN's


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
