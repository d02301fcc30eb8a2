"""Where the tensors lie inside a flat run, and which elements a fused kernel treats as a tail.

PyTorch's fused CPU kernels (`torch._fused_adamw_`, `torch._fused_adam_`, `torch._fused_sgd_`) walk
a tensor of ``n`` elements in SIMD vectors of ``lanes`` elements from its first element, and do the
last ``n % lanes`` elements with scalar code. The two code paths round differently (the compiler
contracts other multiply-adds), so about a quarter of the second moments and some of the weights of
a tail differ in the last bit from what the vector path gives. Where memory lies, how many threads
run and how long the vector part is make no difference: only *which path* an element takes.

An update that lays tensors flat, cuts them in blocks, or cuts a tensor over two chunks therefore
keeps PyTorch's per-tensor bits if, and only if, exactly the last ``n % lanes`` elements of every
tensor take the scalar path. A `Layout` knows these elements; `patrickstar.optim.walk` treats them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one tensor that lies in a run.

    Attributes:
        start: index in the run of the segment's first element.
        shape: shape of the *whole* tensor.
        offset: index in the flattened tensor of the segment's first element; 0 unless the tensor
            was cut and this run holds a later piece.
        length: elements of the tensor in this run; -1 means all from `offset` on.
        key: the tensor's place in the fixed parameter order, for rules that keep something per
            tensor; -1 when nobody asks.
    """

    start: int
    shape: tuple[int, ...]
    offset: int = 0
    length: int = -1
    key: int = -1

    @property
    def tensor_numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Elements of the tensor in this run."""
        return self.tensor_numel - self.offset if self.length < 0 else self.length

    @property
    def stop(self) -> int:
        """Index in the run just after the segment."""
        return self.start + self.numel

    @property
    def whole(self) -> bool:
        """Whether the run holds all of the tensor."""
        return self.offset == 0 and self.numel == self.tensor_numel


@dataclass(frozen=True, slots=True)
class TailIndex:
    """Elements of a run that must take the scalar path of a fused kernel.

    Attributes:
        index: their indices in the run, int64, shape ``[total]``, on the CPU.
        lengths: how many belong to each tensor, each less than the kernel's lanes.
    """

    index: Tensor
    lengths: tuple[int, ...]


@dataclass(slots=True)
class Layout:
    """The segments of a run, in ascending order, without overlap; gaps (padding) are allowed.

    Build it once per run and keep it: what is derived from it is computed once.

    Args:
        segments: the tensors or pieces of tensors in the run.
    """

    segments: tuple[Segment, ...]
    _tails: dict[tuple[int, int], tuple[bool, TailIndex | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.segments = tuple(self.segments)
        end = 0
        for seg in self.segments:
            assert seg.start >= end, f"segment at {seg.start} overlaps the one before it"
            assert seg.offset >= 0 and seg.offset + seg.numel <= seg.tensor_numel, seg
            end = seg.stop

    @classmethod
    def of_shapes(cls, shapes: Sequence[Sequence[int]], *, align: int = 1) -> Layout:
        """Whole tensors one after another, each starting at a multiple of `align` elements."""
        segments = []
        start = 0
        for key, shape in enumerate(shapes):
            start = -(-start // align) * align
            seg = Segment(start, tuple(shape), key=key)
            segments.append(seg)
            start = seg.stop
        return cls(tuple(segments))

    @property
    def numel(self) -> int:
        """Elements from the start of the run to the end of the last segment."""
        return self.segments[-1].stop if self.segments else 0

    def cut(self, start: int, stop: int) -> Layout:
        """The layout of elements ``start:stop`` of this run, taken as a run of its own."""
        parts = []
        for seg in self.segments:
            low, high = max(seg.start, start), min(seg.stop, stop)
            if low < high:
                offset = seg.offset + low - seg.start
                parts.append(Segment(low - start, seg.shape, offset, high - low, seg.key))
        return Layout(tuple(parts))

    def tails(self, numel: int, lanes: int) -> tuple[bool, TailIndex | None]:
        """Which elements of a run of `numel` elements need the scalar path.

        Returns:
            ``(native, rest)``: `native` is whether the last ``numel % lanes`` elements of the run
            are exactly the tail of one tensor, so that a kernel called on the whole run already
            does the right thing there (also true if nothing is left over); `rest` names all other
            elements that need the scalar path, or is None if there are none.
        """
        known = self._tails.get((numel, lanes))
        if known is None:
            known = self._find_tails(numel, lanes)
            self._tails[numel, lanes] = known
        return known

    def _find_tails(self, numel: int, lanes: int) -> tuple[bool, TailIndex | None]:
        left_over = (numel - numel % lanes, numel)
        native = numel % lanes == 0
        ranges = []
        for seg in self.segments:
            total = seg.tensor_numel
            first = max(total - total % lanes, seg.offset)
            low, high = seg.start + first - seg.offset, seg.stop
            if low >= high:
                continue
            if (low, high) == left_over:
                native = True
            else:
                ranges.append((low, high))
        if not ranges:
            return native, None
        index = torch.cat([torch.arange(low, high) for low, high in ranges])
        return native, TailIndex(index, tuple(high - low for low, high in ranges))
