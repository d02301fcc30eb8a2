"""What autograd saves for the backward, and how it gets it back.

`torch.autograd.graph.saved_tensors_hooks` show every tensor that the graph saves. One that lies in
a chunk is packed as a description (chunk, offset, shape) and holds no memory, so its chunk can
leave; when the backward asks for it, at the very operator that needs it, the chunk is fetched and
the view made anew. While the operator holds that view, the chunk stays: see `memory.manager`.

Hooked tensors lose autograd's own check that nobody changed them in place since the forward, so it
is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.engine.aligned import Slot
from patrickstar.engine.region_inputs import AwayView, RegionInputs
from patrickstar.engine.split import is_split
from patrickstar.engine.state import ModelState
from patrickstar.memory import Access, ChunkManager, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class ChunkView:
    """A saved tensor that lies in a chunk, without its data."""

    use: Use
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    slot: Slot | None
    version: int


@dataclass(frozen=True, slots=True)
class SplitView:
    """A saved DTensor whose part lies in a chunk."""

    part: Any
    kind: Any
    spec: Any


class SavedTensors:
    """Packs and unpacks what autograd saves while an engine's model runs.

    Args:
        inputs: puts inputs of checkpointed regions away, if that is wanted.
    """

    def __init__(
        self, manager: ChunkManager, state: ModelState, inputs: RegionInputs | None = None
    ) -> None:
        self._manager, self._state, self._inputs = manager, state, inputs

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def tidy(self) -> None:
        """Give up what was put away and has gone with its graph."""
        if self._inputs is not None:
            self._inputs.tidy()

    def pack(self, tensor: torch.Tensor) -> Any:
        if (  # most of them, and with nothing to put away
            self._inputs is None
            and type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and self._manager.chunk_of(tensor.untyped_storage()._cdata) is None
        ):
            return _outside(tensor)
        with _PLAIN():
            if is_split(tensor):
                return self._pack_split(tensor)
            if tensor.layout is not torch.strided or tensor.device.type == "meta":
                return _outside(tensor)
            chunk = self._manager.chunk_of(tensor.untyped_storage()._cdata)
            if chunk is None:
                if self._inputs is not None and self._inputs.wants(tensor):
                    return self._inputs.put(tensor)
                return _outside(tensor)
            if self._inputs is not None and (away := self._inputs.view(chunk, tensor)) is not None:
                return away
            offset = int(tensor.storage_offset())
            slot = self._state.slot_at(chunk, offset)
            # A view that was unpacked once and is saved again (a backward that makes a graph)
            # has a version counter of its own; the parameter's is the one that is checked.
            version = tensor._version if slot is None else slot.parameter._version
            return ChunkView(
                Use(chunk, Access.READ),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                offset,
                slot,
                version,
            )

    def _pack_split(self, tensor: torch.Tensor) -> Any:
        """A DTensor: by its part, if that lies in a chunk."""
        part = tensor._local_tensor  # type: ignore[attr-defined]
        plain = part.layout is torch.strided and not part.is_meta
        if plain and self._manager.chunk_of(part.untyped_storage()._cdata) is not None:
            return SplitView(self.pack(part), type(tensor), tensor._spec)  # type: ignore[attr-defined]
        return _outside(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is SplitView:
            return packed.kind(self.unpack(packed.part), packed.spec, requires_grad=False)  # type: ignore[no-any-return]
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                raise _changed(f"a saved tensor of shape {tuple(tensor.shape)}")
            return tensor  # type: ignore[no-any-return]
        if type(packed) is AwayView:
            assert self._inputs is not None, "who packs can unpack"
            return self._inputs.get(packed)
        view: ChunkView = packed
        if view.slot is not None:
            with _PLAIN():
                if view.slot.parameter._version != view.version:
                    raise _changed(f"parameter {view.slot.name!r}")
        if self._state.sharding is not None:
            self._state.sharding.used((view.use.chunk,))
        self._manager.access((view.use,))
        storage = self._manager.tensor(self._manager.chunk(view.use.chunk)).untyped_storage()
        made = torch.empty(0, dtype=view.dtype, device=storage.device)
        return made.set_(storage, view.offset, view.shape, view.stride)


def _outside(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor that lies in no chunk, and its version.

    A result knows the node that it comes from, and if that node knew it in turn, neither would ever
    go where no backward is run. Without its node it has the same memory and the same version.
    """
    return (tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was changed in place after the forward that saved it for the backward; "
        "run the forward again after changing it, or change a copy "
        "(two backward passes through one graph with a step in between do this too)"
    )
