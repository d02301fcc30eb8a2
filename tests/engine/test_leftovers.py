"""Parameters that the model does not name keep their values and stay usable."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.engine.initialize import make_engine

from .training import loss_of, run_engine, run_plain, settings

WIDTH = 32


class Taught(nn.Module):
    """A student beside a teacher that no parameter list has."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        teacher = copy.deepcopy(self.student)
        teacher.requires_grad_(False)
        self.hidden = [teacher]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.student(x) - self.hidden[0](2 * x)).square().mean()


def batches(count: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(4, WIDTH, generator=draw)} for _ in range(count)]


@pytest.mark.parametrize("host", [None, 1 << 16])
def test_a_teacher_hidden_in_a_list_teaches(host: int | None, tmp_path: Path) -> None:
    how = settings(host=host, disk=tmp_path, chunk=2048)
    run_plain(Taught, batches(4)).assert_same(run_engine(Taught, batches(4), how))


@pytest.mark.parametrize("accelerator", [False, True])
def test_a_hidden_parameter_is_an_ordinary_one(accelerator: bool, tmp_path: Path) -> None:
    how = settings(device=1 << 20, host=1 << 20, disk=tmp_path, accelerator=accelerator)
    torch.manual_seed(0)
    expected = Taught().hidden[0].weight
    torch.manual_seed(0)
    engine, _ = make_engine(Taught, how)
    weight = engine.module.hidden[0].weight
    assert type(weight) is nn.Parameter and torch.equal(weight, expected)
    engine.close()
    assert torch.equal(weight, expected)


def test_layers_that_are_copies_of_one_are_built_inside_the_budget(tmp_path: Path) -> None:
    def provide() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)

        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layers(x).square().mean()

        return Encoder()

    how = settings(host=3 << 20, disk=tmp_path, chunk=50_000)
    torch.manual_seed(0)
    engine, optimizer = make_engine(provide, how)  # 2.4 MB of weights, 9.6 MB of state
    assert engine.memory_report().tiers["disk"].peak > 0
    for _ in range(2):
        engine.backward(loss_of(engine(torch.randn(2, 3, 64))))
        optimizer.step()
    assert engine.memory_report().tiers["host"].peak <= 3 << 20
    engine.close()
