"""What users do between the steps of a run on several ranks: look, change, clip, evaluate."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import ChunkStateError
from patrickstar.zero import GatheredParameters
from tests.engine.data_parallel import (
    Action,
    Case,
    Outcome,
    gpt,
    micro_batches,
    open_run,
    own_rows,
    train,
)

STAGES = (0, 2, 3)


def evaluate(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    """Between the backward and the step: the weights must be seen, and nothing changed."""
    draw = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 101, (2, 8), generator=draw)
    with torch.no_grad():
        assert math.isfinite(float(engine(tokens, tokens)))


def look_at_gradients(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    for parameter in engine.parameters():
        assert parameter.grad is not None
        parameter.grad.sum()


def clip_by_optimizer(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    optimizer.clip_grad_norm_(0.5)


def clip_as_torch_does(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.5)


def double_by_hand(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    """On all ranks alike."""
    for parameter in engine.parameters():
        with torch.no_grad():
            parameter.grad.mul_(2.0)


def halve_first(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    """On the first rank alone; the others take it from there."""
    weight = next(engine.parameters())
    with GatheredParameters(weight, modifier_rank=0):
        if engine.global_rank == 0:
            with torch.no_grad():
                weight.mul_(0.5)


def halve_everywhere(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    with torch.no_grad():
        next(engine.parameters()).mul_(0.5)


def reload(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
    """Weights go out and come back."""
    engine.load_state_dict(engine.state_dict())


ACTIONS: dict[str, Action] = {
    action.__name__: action
    for action in (
        evaluate,
        look_at_gradients,
        clip_by_optimizer,
        clip_as_torch_does,
        double_by_hand,
        halve_first,
        halve_everywhere,
        reload,
    )
}


def between(rank: int, size: int, action: str, clipping: float, precision: str) -> list[Outcome]:
    return [
        train(rank, size, Case(stage, precision, clipping=clipping), ACTIONS[action])
        for stage in STAGES
    ]


@pytest.mark.parametrize("action", ["evaluate", "look_at_gradients"])
def test_looking_changes_no_bit(ranks, action):
    plain = ranks.run(between, 2, "evaluate", 0.5, "bf16")[0][0] if action != "evaluate" else None
    found = ranks.run(between, 2, action, 0.5, "bf16")
    for outcomes in found:
        for outcome in outcomes:
            assert outcome.same_bits(plain or found[0][0])


def test_weights_that_go_out_and_come_back_are_those_of_one_rank(ranks):
    alone = train(0, 1, Case(precision="bf16"), reload)  # masters start anew from rounded weights
    answers = ranks.run(between, 2, "reload", 0.5, "bf16")
    for outcomes in answers:
        for outcome in outcomes:
            outcome.assert_close(alone, 2e-3)
            assert outcome.same_bits(answers[0][0])


@pytest.mark.parametrize("action", ["clip_by_optimizer", "clip_as_torch_does", "double_by_hand"])
def test_changed_gradients_count_as_on_one_rank(ranks, action):
    alone = train(0, 1, Case(clipping=0.0), ACTIONS[action])
    for outcomes in ranks.run(between, 2, action, 0.0, "fp32"):
        for outcome in outcomes:
            outcome.assert_close(alone, 1e-6)
            assert outcome.same_bits(outcomes[0])


@pytest.mark.parametrize("action", ["halve_first", "halve_everywhere"])
def test_changed_weights_count_as_on_one_rank(ranks, action):
    alone = train(0, 1, Case(precision="bf16"), halve_everywhere)
    answers = ranks.run(between, 2, action, 0.5, "bf16")
    for outcomes in answers:
        for outcome in outcomes:
            outcome.assert_close(alone, 2e-3)
            assert outcome.same_bits(answers[0][0])


def gradients_seen(rank: int, size: int, stage: int) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def keep(engine: Engine, optimizer: ChunkedOptimizer, step: int) -> None:
        kept.extend(parameter.grad.clone() for parameter in engine.parameters())

    train(rank, size, Case(stage, steps=1), keep)
    return kept


@pytest.mark.parametrize("stage", STAGES)
def test_after_the_backward_grad_is_the_mean_on_every_rank(ranks, stage):
    torch.manual_seed(0)
    module = gpt()
    (batch,) = micro_batches(Case(steps=1))
    for rank in range(3):
        rows = own_rows(batch, rank, 3)
        (module(rows, rows.roll(-1, 1)) / 3).backward()
    for answer in ranks.run(gradients_seen, 3, stage):
        for ours, parameter in zip(answer, module.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)


def look_under_no_sync(rank: int, size: int) -> list[str]:
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = open_run(rank, size, Case(2, accumulation=2), folder)
        weight = next(engine.parameters())
        rows = own_rows(micro_batches(Case(steps=1))[0], rank, size)

        def look() -> None:
            try:
                grad = weight.grad
                found.append("none" if grad is None else f"{float(grad.norm()):.6f}")
            except ChunkStateError as error:
                found.append(str(error))

        with engine.no_sync():
            engine.backward(engine(rows, rows.roll(-1, 1)))
        look()
        engine.backward(engine(rows, rows.roll(-1, 1)))
        look()
        with engine.no_sync():
            engine.backward(engine(rows, rows.roll(-1, 1)))
        look()
        engine.close()
    return found


def test_a_gradient_that_is_partly_this_ranks_own_is_not_shown(ranks):
    torch.manual_seed(0)
    module = gpt()
    (batch,) = micro_batches(Case(steps=1))
    rows = own_rows(batch, 0, 2)
    (module(rows, rows.roll(-1, 1)) / 2).backward()
    own = float(next(module.parameters()).grad.norm())
    first, second = ranks.run(look_under_no_sync, 2)
    assert float(first[0]) == pytest.approx(own, rel=1e-4), "what this rank has"
    assert first[0] != second[0] and first[1] == second[1]
    assert "under no_sync" in first[2] and "under no_sync" in second[2]


class Partly(nn.Module):
    """Half of it is frozen, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(17, 17)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.tied = nn.Linear(17, 17)
        self.tied.weight = self.first.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(tokens % 17, 17).float()
        x = x.to(self.first.weight.dtype)
        return self.tied(torch.tanh(self.frozen(self.first(x)))).square().mean()


def train_partly(rank: int, size: int) -> list[Outcome]:
    return [
        train(rank, size, Case(stage, chunk=300), provider=Partly, param_groups=None)
        for stage in (0, 1, 2, 3)
    ]


def test_frozen_and_tied_weights_train_as_on_one_rank(ranks):
    alone = train(0, 1, Case(chunk=300), provider=Partly, param_groups=None)
    for outcomes in ranks.run(train_partly, 3):
        for outcome in outcomes:
            outcome.assert_close(alone, 1e-6)
            assert outcome.same_bits(outcomes[0])
            for name in ("frozen.weight", "frozen.bias"):
                assert torch.equal(outcome.weights[name], alone.weights[name])


class Overflows(Partly):
    """Its loss is infinite where the first token says so."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().forward(tokens, targets)
        return loss * (math.inf if int(tokens[0, 0]) == 100 else 1.0)


def overflow(rank: int, size: int, stage: int) -> list[Any]:
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        case = Case(stage, "fp16", chunk=300)
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
        engine, optimizer = open_run(
            rank, size, case, folder, Overflows, param_groups=None, config=fp16
        )
        for step in range(3):
            tokens = torch.full((2, 4), 100 if rank == 1 and step == 1 else step + rank)
            engine.backward(engine(tokens, tokens))
            optimizer.step()
            optimizer.zero_grad()
            weight = engine.state_dict()["first.weight"].clone()
            found.append((engine.was_step_applied(), engine.loss_scale, weight))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, stage):
    first, second = ranks.run(overflow, 2, stage)
    assert [applied for applied, _, _ in first] == [applied for applied, _, _ in second]
    for ours, theirs in zip(first, second, strict=True):
        assert ours[1] == theirs[1] and torch.equal(ours[2], theirs[2])
    assert not first[1][0] and torch.equal(first[0][2], first[1][2])
    assert first[2][0] and not torch.equal(first[1][2], first[2][2])
