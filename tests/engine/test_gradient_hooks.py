"""Hooks of the user's that run when a gradient has been accumulated."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.engine.training import run_engine, run_plain, settings

WIDTH = 32


class Hooked(nn.Module):
    """Its parameters have hooks before any engine sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def test_a_hook_that_a_parameter_had_before_sees_and_changes_the_gradient(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, WIDTH, generator=draw)} for _ in range(3)]
    how = settings(host=1 << 17, disk=tmp_path, chunk=2048)
    run_engine(Hooked, batches, how).assert_same(run_plain(Hooked, batches))
