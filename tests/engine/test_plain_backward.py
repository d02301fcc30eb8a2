"""`loss.backward()` in a script counts, and is divided, as `engine.backward(loss)` is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import patrickstar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return {"out": self.last(hidden), "hidden": hidden}


def run(how: str, accumulation: int, precision: str = "bf16") -> tuple[Any, ...]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        precision: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = patrickstar.initialize(model=Net(), config=config)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(6):
        output = engine(torch.randn(4, 8, generator=generator))
        loss = output["out"].float().square().mean() + output["hidden"].float().mean()
        if how == "engine":
            engine.backward(loss)
        else:
            (engine.scale(loss) if how == "scaled" else loss).backward()
        engine.step()
        found.append((loss.item(), engine.micro_steps, engine.global_steps))
    weights = [w.clone() for w in engine.state_dict().values()]
    engine.close()
    return found, weights


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["plain", "scaled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_trains_as_the_backward_of_the_engine(
    how: str, accumulation: int, precision: str
) -> None:
    if (how, precision) == ("plain", "fp16"):
        with pytest.raises(RuntimeError, match=r"engine\.scale\(loss\)\.backward"):
            run(how, accumulation, precision)
        return
    found, weights = run(how, accumulation, precision)
    expected, others = run("engine", accumulation, precision)
    assert found == expected
    assert found[-1][1:] == (6, 6 // accumulation)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_backward_that_failed_does_not_count() -> None:
    engine, *_ = patrickstar.initialize(model=Net(), config={})

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("bad")

    output = engine(torch.ones(4, 8))
    output["hidden"].register_hook(fail)
    with pytest.raises(ArithmeticError):
        output["out"].sum().backward()
    assert engine.micro_steps == 0
    engine(torch.ones(4, 8))["out"].sum().backward()
    assert engine.micro_steps == 1
    engine.close()
