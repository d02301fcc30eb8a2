"""How managed tensors reach their chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from patrickstar.engine.split import is_split
from patrickstar.memory import Access, ChunkManager, Use

if TYPE_CHECKING:
    from patrickstar.engine.ahead import Ahead
    from patrickstar.engine.contents import Training
    from patrickstar.engine.sharding import Sharding


class ChunkHome:
    """The home of every tensor in the chunks of one `ChunkManager`.

    Attributes:
        on_write: called with a chunk's id when its contents are changed from Python outside the
            engine. Gradients are served by `grads`, once there are any.
        training: tells the parts of the run that trains these tensors, once there is one.
        laid_out: whether the chunks have the layout of a run, in which nobody can be replaced.
        ahead: what these tensors were built with before there is a run, see `engine.ahead`.
        has_split: whether some parameters are parts of larger ones, see `engine.split`.
        sharding: is told what is used, if some of the chunks are shared by several ranks.
    """

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager
        self.host_tier = [tier.name for tier in manager.tiers].index("host")
        self.on_write: Callable[[int], None] | None = None
        self.get_gradient: Callable[[Any], torch.Tensor | None] | None = None
        self.set_gradient: Callable[[Any, torch.Tensor | None], None] | None = None
        self.move_to_new_data: Callable[[Any, torch.Tensor], None] | None = None
        self.adopt: Callable[[Any], None] | None = None
        self.training: Callable[[], Training | None] | None = None
        self.laid_out = self.has_split = False
        self.ahead: Ahead | None = None
        self.sharding: Sharding | None = None

    def use(self, tensors: list[Any], *, writes: list[Any]) -> AbstractContextManager[None]:
        chunks = self._chunks(tensors)
        written = self._chunks(writes) if writes else {}
        if written:
            self.about_to_write(tuple(written))
        if self.sharding is not None:
            self.sharding.used(chunks)
        uses = [Use(c, Access.UPDATE if c in written else Access.READ) for c in chunks]
        return self.manager.use(uses)

    def about_to_write(self, chunks: Sequence[int]) -> None:
        """Chunks will be changed outside the engine; what is due sees them as they were before."""
        self.manager.do_due(chunks)
        if self.on_write is not None:
            for chunk in chunks:
                self.on_write(chunk)

    def place(self, tensor: Any) -> tuple[int, int]:
        """The chunk of a managed tensor and its offset in it, in elements."""
        with torch._C.DisableTorchFunctionSubclass():
            chunk = self.manager.chunk_of(tensor.untyped_storage()._cdata)
            assert chunk is not None, "a managed tensor lives in a chunk"
            return chunk, int(tensor.storage_offset())

    def owns(self, storage: int) -> bool:
        return self.manager.chunk_of(storage) is not None

    def get_grad(self, parameter: Any) -> torch.Tensor | None:
        return self.get_gradient(parameter) if self.get_gradient is not None else None

    def set_grad(self, parameter: Any, grad: torch.Tensor | None) -> None:
        if self.set_gradient is not None:
            self.set_gradient(parameter, grad)

    def set_data(self, parameter: Any, data: torch.Tensor) -> None:
        """`parameter.data = data`: the contents go to the parameter's place in its chunk.

        Data of another shape or dtype needs a new place, which there is while the model is built.
        So does data of other strides (`to(memory_format=torch.channels_last)`), since kernels are
        chosen by them and round differently; later the strides stay what they are.
        """
        if is_split(data):
            data = data._local_tensor  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            fits = data.shape == parameter.shape and data.dtype == parameter.dtype
            same_strides = data.stride() == parameter.stride()
        if fits and (same_strides or self.move_to_new_data is None):
            with self.use([parameter], writes=[parameter]):
                with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
                    parameter.detach().copy_(data)
        elif self.move_to_new_data is not None:
            self.move_to_new_data(parameter, data)
        else:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} and dtype {parameter.dtype} was "
                f"given data of shape {tuple(data.shape)} and dtype {data.dtype}; its chunk is "
                "laid out already. Change the model inside model_provider"
            )

    def adopt_copy(self, parameter: Any) -> None:
        """A copy of a parameter was made; while a model is built, it gets a place in a chunk too.

        Models that are larger than memory are made of copies: `nn.TransformerEncoder`, for one.
        """
        if not self.laid_out and self.adopt is not None:
            self.adopt(parameter)

    def _chunks(self, tensors: list[Any]) -> dict[int, None]:
        found: dict[int, None] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                chunk = self.manager.chunk_of(tensor.untyped_storage()._cdata)
                if chunk is not None:
                    found[chunk] = None
        return found
