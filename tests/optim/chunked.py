"""Lay random tensors flat, cut them into runs, and compare with an ordinary per-tensor loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from patrickstar.optim import Hyper, Layout, Run, UpdateRule


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal to the bit, signs of zero included; any NaN equals any NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    nan = left.isnan() & right.isnan()
    return bool(((left.contiguous().view(ints) == right.contiguous().view(ints)) | nan).all())


def random_tensors(shapes: Sequence[Sequence[int]], seed: int, scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator) * scale for shape in shapes]


@dataclass
class Chunked:
    """Parameters, gradients, masters and states in flat tensors, cut at the given places."""

    rule: UpdateRule
    hyper: Hyper
    start: Sequence[Tensor]
    dtype: torch.dtype = torch.float32
    master: bool = False
    align: int = 1
    cuts: Sequence[int] = ()
    flat: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = Layout.of_shapes([t.shape for t in self.start], align=self.align)
        numel = self.layout.numel
        held = torch.float32 if self.master else self.dtype
        self.flat["param"] = torch.zeros(numel, dtype=self.dtype)
        self.flat["grad"] = torch.zeros(numel, dtype=self.dtype)
        if self.master:
            self.flat["master"] = torch.zeros(numel)
            self.put("master", self.start)
        self.put("param", self.start)
        for spec in self.rule.states(self.hyper):
            self.flat[spec.name] = torch.full((numel,), spec.init, dtype=held)
        bounds = [0, *sorted(c for c in set(self.cuts) if 0 < c < numel), numel]
        self.ranges = list(pairwise(bounds))
        self.layouts = [self.layout.cut(low, high) for low, high in self.ranges]

    def put(self, name: str, tensors: Sequence[Tensor]) -> None:
        for seg, tensor in zip(self.layout.segments, tensors, strict=True):
            self.flat[name][seg.start : seg.stop] = tensor.reshape(-1).to(self.flat[name].dtype)

    def get(self, name: str) -> list[Tensor]:
        return [
            self.flat[name][seg.start : seg.stop].view(seg.shape) for seg in self.layout.segments
        ]

    def step(self, grads: Sequence[Tensor], step: int, **how: Any) -> None:
        self.put("grad", grads)
        names = [spec.name for spec in self.rule.states(self.hyper)]
        runs = []
        for (low, high), layout in zip(self.ranges, self.layouts, strict=True):
            cut = {name: tensor[low:high] for name, tensor in self.flat.items()}
            state = {name: cut[name] for name in names}
            runs.append(Run(cut["param"], cut["grad"], cut.get("master"), state, step, layout))
        self.rule.apply(runs, self.hyper, **how)


def plain_loop(
    optimizer: Any,
    start: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    *,
    unscale: float = 1.0,
    max_norm: float | None = None,
    clip_16_bit: bool = False,
    **kwargs: Any,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """An ordinary loop on per-tensor fp32 masters: parameters, masters and the optimizer."""
    masters = [torch.nn.Parameter(t.clone()) for t in start]
    params = [torch.nn.Parameter(t.to(dtype)) for t in start]
    opt = optimizer(masters, **kwargs)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.to(dtype).clone()
        if max_norm is not None and clip_16_bit:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float() * unscale
        if max_norm is not None and not clip_16_bit:
            torch.nn.utils.clip_grad_norm_(masters, max_norm)
        opt.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
    return [p.detach() for p in params], [m.detach() for m in masters], opt
