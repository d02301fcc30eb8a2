"""An iteration played through without computing.

The module runs on fake tensors (shapes and dtypes without data): its forward, a backward from the
sum of its outputs, and the updates. The same watching that a first live iteration has writes the
same trace, so a plan can be made from it before anything is allocated. A model whose path depends
on the data cannot be rehearsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from patrickstar.engine.parameter import METADATA
from patrickstar.memory.live import LiveStorages, WatchOperators
from patrickstar.memory.trace import Access, Recorder, Trace, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class RehearsedChunks:
    """Where a parameter lives: its chunk, and the chunk of its gradient if it is trained."""

    parameter: int
    gradient: int | None


class _Stage:
    """Notes uses and memory while the rehearsal runs."""

    def __init__(self, base: int) -> None:
        self.recorder = Recorder()
        self._base = base
        self._current: tuple[Use, ...] = ()
        self._chunk_of: dict[int, int] = {}
        self._filled: set[int] = set()
        self.live = LiveStorages(self._chunk_of.__contains__, "cpu")

    def use(self, *uses: Use) -> None:
        if uses != self._current:
            self._current = uses
            self.recorder.moment(uses)
            self.after()

    def before(self, nbytes: int) -> None:
        self.recorder.other(0, self._base + self.live.nbytes + nbytes)

    def after(self) -> None:
        self.recorder.other(0, self._base + self.live.nbytes)

    def adopt(self, fake: torch.Tensor, chunk: int) -> None:
        self._chunk_of[fake.untyped_storage()._cdata] = chunk

    def pack(self, tensor: torch.Tensor) -> Any:
        with _PLAIN():
            return (tensor, self._chunk_of.get(tensor.untyped_storage()._cdata))

    def unpack(self, packed: Any) -> torch.Tensor:
        tensor, chunk = packed
        if chunk is not None:
            self.use(Use(chunk, Access.READ))
        return tensor  # type: ignore[no-any-return]

    def collect(self, gradient: int) -> None:
        access = Access.UPDATE if gradient in self._filled else Access.OVERWRITE
        self._filled.add(gradient)
        self.use(Use(gradient, access))


def rehearse(
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    chunks: Mapping[str, RehearsedChunks],
    updates: list[tuple[tuple[Use, ...], int | None]],
    *,
    dtype: torch.dtype,
    base: int = 0,
) -> Trace:
    """The trace of one iteration of `module` on inputs of these shapes.

    Args:
        module: on any device, the meta device included; it is not changed.
        inputs: positional and keyword arguments; tensors of the right shapes on any device.
        chunks: for each parameter name, where it lives.
        updates: the uses of each step of the optimizer and the gradient chunk it gives up.
        dtype: of the parameters and floating-point buffers during training.
        base: bytes that are always there and no chunk owns.

    Raises:
        Exception: whatever a data-dependent model raises on fake tensors.
    """
    stage = _Stage(base)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        state: dict[str, Any] = {}
        parameters: list[Any] = []
        made: dict[int, Any] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = _fake_parameter(parameter, chunks.get(name), dtype, stage)
                parameters.append(made[id(parameter)])
            state[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(remove_duplicate=False):
            state[name] = _fake_like(buffer, dtype)
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else _fake_like(t, dtype), inputs
        )
        watch = WatchOperators(stage.live, stage.before, stage.after)
        stage.recorder.segment("forward")
        # Swapped for the backward too, which may compute parts of the forward again.
        with _reparametrize_module(module, state), watch, torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(stage.pack, stage.unpack):
                loss = _some_loss(module(*args, **kwargs))
                stage.recorder.segment("backward")
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
        del loss, state, made, fake_mode
        stage.recorder.segment("step")
        for uses, gradient in updates:
            stage.use(*uses)
            if gradient is not None:
                stage.recorder.blanked(gradient)
    return stage.recorder.trace


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device="cpu")


def _fake_parameter(
    parameter: nn.Parameter, chunks: RehearsedChunks | None, dtype: torch.dtype, stage: _Stage
) -> Any:
    with _PLAIN():
        fake = nn.Parameter(
            torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad
        )
    if chunks is None:
        return fake
    stage.adopt(fake, chunks.parameter)
    use = Use(chunks.parameter, Access.READ)
    gradient = chunks.gradient
    if gradient is not None and parameter.requires_grad:

        def collect(leaf: Any) -> None:
            leaf.grad = None
            stage.collect(gradient)

        fake.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return _watched(fake, lambda: stage.use(use))


def _watched(fake: nn.Parameter, note: Callable[[], None]) -> Any:
    # A fake tensor has a class of its own; one that also notes its uses is made beside it.
    kind = type(fake)
    watched = type("_RehearsedFake", (kind,), {"__torch_function__": _noting})
    fake.__class__ = watched
    fake._note = note  # type: ignore[attr-defined]
    return fake


@classmethod  # type: ignore[misc]
def _noting(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in METADATA:
        for leaf in tree_leaves((args, kwargs)):
            note = getattr(leaf, "_note", None) if isinstance(leaf, torch.Tensor) else None
            if note is not None:
                note()
    with _PLAIN():
        return func(*args, **(kwargs or {}))


def _some_loss(output: Any) -> torch.Tensor | None:
    """The loss in the output, or the sum of what could become one."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return None
    first = leaves[0]
    return first if first.numel() == 1 else sum((t.sum() for t in leaves[1:]), first.sum())
