"""`ChunkedAdamW`: an ordinary optimizer whose states live in chunks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.errors import BudgetError, ConfigError
from patrickstar.optim.chunked import ChunkedAdamW

HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 61), nn.Tanh(), nn.Linear(61, 37), nn.LayerNorm(37))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(step))
        module(x.to(next(module.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("chunk", [None, 2048, 96])
@pytest.mark.parametrize("budget", [None, 60_000])
def test_it_has_the_bits_of_fused_adamw(
    chunk: int | None, budget: int | None, tmp_path: Path
) -> None:
    expected, found = model(), model()
    train(expected, torch.optim.AdamW(expected.parameters(), fused=True, **HYPER), 6)
    memory = {} if budget is None else {"host": budget, "disk": str(tmp_path)}
    if budget is not None and chunk is None:
        memory["host"] = 200_000
    ours = ChunkedAdamW(found.parameters(), **HYPER, memory=memory, chunk_size=chunk)
    train(found, ours, 6)
    assert all(map(torch.equal, weights(found), weights(expected)))
    report = ours.memory_report().tiers["host"]
    assert budget is None or report.peak <= memory["host"]
    ours.close()


def test_parameters_of_16_bits_have_fp32_masters(tmp_path: Path) -> None:
    found, expected = model().bfloat16(), model().bfloat16()
    masters = [p.detach().float() for p in expected.parameters()]
    reference = torch.optim.AdamW(masters, fused=True, **HYPER)
    ours = ChunkedAdamW(
        found.parameters(), **HYPER, memory={"host": 40_000, "disk": f"{tmp_path}:1MiB"},
        chunk_size=700,
    )  # fmt: skip
    train(found, ours, 5)
    for step in range(5):
        x = torch.randn(8, 37, generator=torch.Generator().manual_seed(step)).bfloat16()
        expected(x).float().square().mean().backward()
        for master, parameter in zip(masters, expected.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        reference.step()
        with torch.no_grad():
            for master, parameter in zip(masters, expected.parameters(), strict=True):
                parameter.copy_(master)
    assert all(map(torch.equal, weights(found), weights(expected)))
    ours.close()


def test_a_saved_state_resumes_with_the_same_bits(tmp_path: Path) -> None:
    straight, first = model(), model()
    train(straight, ChunkedAdamW(straight.parameters(), **HYPER), 6)
    before = ChunkedAdamW(first.parameters(), **HYPER, memory={"host": 60_000, "disk": tmp_path})
    train(first, before, 3)
    saved = copy.deepcopy(before.state_dict())
    second = model()
    second.load_state_dict(first.state_dict())
    after = ChunkedAdamW(second.parameters(), **HYPER, chunk_size=500)
    after.load_state_dict(saved)
    train(second, after, 3, first=3)
    assert all(map(torch.equal, weights(second), weights(straight)))


def test_a_state_of_torch_is_taken_over() -> None:
    straight, first = model(), model()
    train(straight, torch.optim.AdamW(straight.parameters(), fused=True, **HYPER), 6)
    before = torch.optim.AdamW(first.parameters(), fused=True, **HYPER)
    train(first, before, 3)
    after = ChunkedAdamW(first.parameters(), **HYPER)
    after.load_state_dict(before.state_dict())
    train(first, after, 3, first=3)
    assert all(map(torch.equal, weights(first), weights(straight)))


def test_what_is_put_into_state_is_taken_over() -> None:
    """So torch's ZeroRedundancyOptimizer loads a checkpoint."""
    straight, first = model(), model()
    train(straight, torch.optim.AdamW(straight.parameters(), fused=True, **HYPER), 6)
    before = torch.optim.AdamW(first.parameters(), fused=True, **HYPER)
    train(first, before, 3)
    after = ChunkedAdamW(first.parameters(), **HYPER, chunk_size=500)
    after.state.update({p: copy.deepcopy(state) for p, state in before.state.items()})
    for index, state in after.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], before.state_dict()["state"][index]["exp_avg"])
    train(first, after, 3, first=3)
    assert all(map(torch.equal, weights(first), weights(straight)))
    assert not after.state, "the states are in chunks, and nowhere else"


def test_parameters_exchanged_after_construction_are_updated() -> None:
    """DeepSpeed replaces the parameters of the groups by flat partitions."""
    flat = torch.zeros(1000, requires_grad=True)
    optimizer = ChunkedAdamW([torch.zeros(3, requires_grad=True)], **HYPER, chunk_size=128)
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones(1000)
    optimizer.step()
    assert torch.all(flat < 0)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    module = model()
    optimizer = ChunkedAdamW(module.parameters(), **HYPER)
    before = weights(module)
    module[0](torch.ones(1, 37)).sum().backward()
    optimizer.step()
    after = weights(module)
    assert not torch.equal(before[0], after[0])
    assert all(map(torch.equal, before[2:], after[2:]))


def test_a_budget_below_one_chunk_is_refused(tmp_path: Path) -> None:
    module = model()
    memory = {"host": 9000, "disk": tmp_path}
    optimizer = ChunkedAdamW(module.parameters(), **HYPER, memory=memory, chunk_size=2048)
    module(torch.ones(1, 37)).sum().backward()
    with pytest.raises(BudgetError, match="host budget"):
        optimizer.step()


def test_an_unknown_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="'hots'"):
        ChunkedAdamW(model().parameters(), memory={"hots": "1GiB"})
