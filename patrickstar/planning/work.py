"""What an iteration computes: its operators, by kind, and at which moment of the trace each runs.

Operators with the same name, shapes, dtypes and layouts are of one kind; a transformer has a few
dozen, however deep it is. So what a kind takes can be measured once and counted often.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class TensorKind:
    """A tensor without its data.

    Attributes:
        managed: it lies in a chunk, so it comes from memory and not from a cache.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    managed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class OperatorKind:
    """An operator on tensors of these kinds.

    Attributes:
        func: the operator's overload.
        leaves: of its arguments; tensors as `TensorKind`.
        structure: of its arguments.
        flops: multiplications and additions.
        nbytes: read and written.
    """

    func: Any
    leaves: tuple[Any, ...]
    structure: TreeSpec
    flops: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating-point argument; fp32 if there is none."""
        for leaf in self.leaves:
            if isinstance(leaf, TensorKind) and leaf.dtype.is_floating_point:
                return leaf.dtype
        return torch.float32

    @property
    def name(self) -> str:
        """What it is called in a file: the operator, and everything its speed depends on."""
        leaves = [
            f"{leaf.dtype}{list(leaf.shape)}{list(leaf.stride)}{'m' if leaf.managed else ''}"
            if isinstance(leaf, TensorKind)
            else repr(leaf)
            for leaf in self.leaves
        ]
        return f"{self.func} {' '.join(leaves)}"


class Work:
    """Notes the operators of a rehearsal; see `patrickstar.engine.rehearsal.OperatorSink`.

    Attributes:
        kinds: how often each kind runs at each moment: kind to moment to count.
        gradients: bytes of gradients that go to their chunks, by moment.
    """

    def __init__(self) -> None:
        self.kinds: dict[OperatorKind, dict[int, int]] = {}
        self.gradients: dict[int, int] = {}
        self._known: dict[Any, OperatorKind] = {}

    @property
    def flops(self) -> int:
        """Of the whole iteration."""
        return sum(kind.flops * sum(times.values()) for kind, times in self.kinds.items())

    @property
    def operators(self) -> int:
        """How many run in an iteration."""
        return sum(sum(times.values()) for times in self.kinds.values())

    def ran(
        self, moment: int, func: Any, args: Any, kwargs: Any, result: Any, managed: Container[int]
    ) -> None:
        """An operator ran at `moment`."""
        leaves, structure = tree_flatten((args, kwargs))
        described = tuple(_described(leaf, managed) for leaf in leaves)
        key = (func, described, str(structure))
        kind = self._known.get(key)
        if kind is None:
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            nbytes = sum(leaf.nbytes for leaf in described if isinstance(leaf, TensorKind))
            nbytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
            flops = _flops(func, args, kwargs, result)
            kind = self._known[key] = OperatorKind(func, described, structure, flops, nbytes)
        times = self.kinds.setdefault(kind, {})
        times[moment] = times.get(moment, 0) + 1

    def stored(self, moment: int, gradient: torch.Tensor) -> None:
        """A gradient was copied into its chunk at `moment`."""
        nbytes = gradient.numel() * gradient.element_size()
        self.gradients[moment] = self.gradients.get(moment, 0) + nbytes

    def seconds(
        self, moments: int, of: Callable[[OperatorKind], float], copy_bytes_per_s: float
    ) -> list[float]:
        """What computes at each of so many moments, with `of` saying what a kind takes."""
        taken = [0.0] * max(moments, 1)
        for kind, times in self.kinds.items():
            each = of(kind)
            for moment, count in times.items():
                taken[moment] += each * count
        for moment, nbytes in self.gradients.items():
            taken[moment] += 2 * nbytes / copy_bytes_per_s
        return taken


def _described(leaf: Any, managed: Container[int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        lies_in_chunk = leaf.untyped_storage()._cdata in managed
        return TensorKind(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, lies_in_chunk)
    try:
        hash(leaf)
    except TypeError:
        return repr(leaf)
    return leaf


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    if packet is _ATTENTION:  # what attention on a CPU runs, which PyTorch's counter leaves out
        shapes = [tensor.shape for tensor in args[:3]]
        return int(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if packet is _ATTENTION_BACKWARD:
        shapes = [tensor.shape for tensor in args[:4]]
        return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]
    return 0
