"""A budget that is too small is refused before anything is trained, with one that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.engine.initialize import make_engine
from patrickstar.errors import BudgetError
from patrickstar.memory import Lru
from patrickstar.optim import SGD

from .test_training import Mlp, numbers
from .training import run_engine, settings


def refused(budget: dict[str, int], provider: Any, batches: Any, **how: Any) -> BudgetError | None:
    """Train two steps; the refusal, which must come before the first update."""
    engine = None
    try:
        engine, optimizer = make_engine(provider, settings(**budget, **how))
        for batch in batches[:2]:
            engine.backward(engine(**batch))
            optimizer.step()
            optimizer.zero_grad()
    except BudgetError as error:
        if engine is not None and (engine.global_steps or optimizer.torn):
            pytest.fail("it had begun to train")
        return error
    finally:
        if engine is not None:
            engine.close()
    return None


def test_what_only_the_second_step_needs_is_refused_before_the_first() -> None:
    batches = numbers(2, 256, 64)
    error = refused({"host": 2_400_000}, Mlp, batches, chunk=9000)  # enough for the first
    assert error is not None
    assert refused({"host": error.smallest}, Mlp, batches, chunk=9000) is None


@pytest.mark.parametrize("chunk", [None, 9000])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_budget_that_is_named_for_the_updates_has_room_for_their_norms(
    chunk: int | None, precision: str, tmp_path: Path
) -> None:
    batches = numbers(2, 1, 64)
    how: dict[str, Any] = {"disk": tmp_path, "chunk": chunk, "precision": precision}
    how |= {"policy": Lru(), "plan": False, "clipping": 0.5}
    budget = {"host": 1 << 16}
    error = refused(budget, Mlp, batches, **how)
    assert error is not None and "updating its largest chunk" in str(error)
    again = refused({"host": error.smallest}, Mlp, batches, **how)
    if again is not None:
        assert "on these inputs" in str(again)
        assert refused({"host": again.smallest}, Mlp, batches, **how) is None


class Fork(nn.Module):
    """Goes one of two ways, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ways[int(x.sum() > 0)](x.repeat(64, 1)).square().mean()


def test_a_path_that_depends_on_data_is_refused_with_what_is_known(tmp_path: Path) -> None:
    budget = 1 << 17
    with pytest.raises(BudgetError, match="depends on the data of this model") as error:
        run_engine(Fork, numbers(2, 8, 64), settings(host=budget, disk=tmp_path, chunk=2048))
    assert error.value.smallest > budget


def alternating(module: nn.Module) -> list[dict[str, Any]]:
    """Groups whose parameters lie between each other's, so that none leaves room behind."""
    parameters = list(module.parameters())
    return [{"params": parameters[first::4]} for first in range(4)]


def test_a_model_that_is_built_but_cannot_be_moved_in_is_refused_once() -> None:
    """Parameters move from where they were built to where they are trained, group by group."""

    def provider() -> nn.Module:
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(24)))

    def smallest(host: int) -> int | None:
        how = settings(host=host, chunk=1, precision="bf16", rule=SGD(), hyper={"lr": 0.1})
        try:
            make_engine(provider, how, alternating)[0].close()
        except BudgetError as error:
            return error.smallest
        return None

    numel = sum(p.numel() for p in provider().parameters())
    named = smallest(int(8.4 * numel))  # the state: weights, masters and gradients
    assert named is not None
    assert smallest(named) is None
