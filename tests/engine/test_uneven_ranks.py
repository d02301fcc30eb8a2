"""Ranks that do not do the same: correct, or an error that says who and what, in time."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.comm import CommError
from patrickstar.errors import BudgetError, PatrickStarError
from tests.engine.data_parallel import Case, open_run
from tests.rank_pool import Died

TIMEOUT = 5.0  # where it has to pass; elsewhere a busy machine has all the time it needs
LIMIT = TIMEOUT + 25.0  # a few beats to find out who it was, and a busy machine
LONG = 60.0
WIDTH = 13  # no number of ranks divides what a layer has


class Experts(nn.Module):
    """Every sample goes through the expert that `choice` names; None leaves them out."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.unused = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor, choice: int | None) -> torch.Tensor:
        x = torch.tanh(self.entry(x)) * self.scale
        if choice is not None:
            x = self.experts[choice](x)
        return x.square().mean()


def rows_of(rank: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=draw)


def seen_alone(choices: list[list[int | None]]) -> dict[str, torch.Tensor]:
    """The weights after steps with the mean gradient, computed by one process."""
    torch.manual_seed(0)
    module = Experts()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step, choice in enumerate(choices):
        for rank, chosen in enumerate(choice):
            (module(rows_of(rank, step), chosen) / len(choice)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: w.detach().clone() for name, w in module.state_dict().items()}


def branch(
    rank: int, size: int, stage: int, chunk: int, choices: list[list[int | None]]
) -> dict[str, torch.Tensor] | str:
    """This rank takes its own way through the experts; the weights, or what went wrong."""
    case = Case(stage, chunk=chunk)
    with tempfile.TemporaryDirectory() as folder:
        engine, optimizer = open_run(
            rank, size, case, folder, Experts, param_groups=None, timeout=LONG
        )
        start = time.monotonic()
        try:
            for step, choice in enumerate(choices):
                engine.backward(engine(rows_of(rank, step), choice[rank]))
                optimizer.step()
                optimizer.zero_grad()
            return {name: w.clone() for name, w in engine.state_dict().items()}
        except CommError as error:
            assert time.monotonic() - start < LIMIT
            return str(error)
        finally:
            engine.close()


WAYS: dict[str, list[list[int | None]]] = {
    "one rank has no gradient for an expert": [[0, 0], [1, 0], [1, None]],
    "every rank takes another expert": [[0, 1], [1, 2], [2, 0]],
    "nobody takes an expert": [[None, None], [0, 0], [None, None]],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_branch_have_the_mean_of_what_there_is(ranks, stage, way):
    expected = seen_alone(WAYS[way])
    first, second = ranks.run(branch, 2, stage, 200, WAYS[way])
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_branch_at_stage_3_are_right_or_told_about_it(ranks, way):
    expected = seen_alone(WAYS[way])
    answers = ranks.run(branch, 2, 3, 200, WAYS[way])
    for answer in answers:
        if way.startswith("nobody"):
            assert not isinstance(answer, str), answer
        if isinstance(answer, str):
            assert "expert" in answer and "rank" in answer, answer
        else:
            for name, weight in answer.items():
                torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def fail(rank: int, size: int, stage: int, how: str) -> tuple[str, float] | None:
    """Rank 1 does not do what the others do, in the second step."""
    case = Case(stage, chunk=200)
    timeout = TIMEOUT if how in ("no batch", "lives on") else LONG
    with tempfile.TemporaryDirectory() as folder:
        engine, optimizer = open_run(
            rank, size, case, folder, Experts, param_groups=None, timeout=timeout
        )
        start = time.monotonic()
        try:
            for step in range(2):
                start = time.monotonic()
                odd = rank == 1 and step == 1
                if odd and how == "no batch":
                    time.sleep(TIMEOUT + 2)
                    return None
                if odd and how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if odd and how == "lives on":
                    with pytest.raises(IndexError):
                        engine(rows_of(rank, step), 99)
                    time.sleep(TIMEOUT - 1)
                    return None
                loss = engine(rows_of(rank, step), 0)
                if odd and how == "exception":
                    raise ArithmeticError("this rank's data are bad")
                engine.backward(loss)
                if odd and how == "killed in the step":
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                optimizer.zero_grad()
            return None
        except (CommError, ArithmeticError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
        finally:
            engine.close()


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (3, "no batch"),
        (1, "exception"),
        (1, "lives on"),
        (3, "killed"),
        (1, "killed in the step"),
    ],
)
def test_the_others_learn_in_time_that_a_rank_does_not_come(ranks, stage, how):
    answers = ranks.run(fail, 3, stage, how)
    if "killed" in how:
        assert isinstance(answers[1], Died)
    for answer in (answers[0], answers[2]):
        assert answer is not None
        text, seconds = answer
        assert text.startswith("CommError") and "rank 1" in text, text
        assert seconds < LIMIT
        assert how != "lives on" or "rank 1 raised IndexError" in text, text


def skip_a_batch(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Rank 1 meets an exception in its first forward, and goes on with its next batch."""
    with tempfile.TemporaryDirectory() as folder:
        engine, optimizer = open_run(
            rank, size, Case(2, chunk=200), folder, Experts, param_groups=None, timeout=LONG
        )
        if rank == 1:
            with pytest.raises(IndexError):
                engine(rows_of(rank, 9), 99)
        for step in range(2):
            engine.backward(engine(rows_of(rank, step), 0))
            optimizer.step()
            optimizer.zero_grad()
        found = {name: w.clone() for name, w in engine.state_dict().items()}
        engine.close()
    return found


def test_a_rank_that_skips_a_batch_after_an_exception_can_go_on(ranks):
    expected = seen_alone([[0, 0], [0, 0]])
    for answer in ranks.run(skip_a_batch, 2):
        for name, weight in answer.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def seeds_differ(rank: int, size: int, stage: int) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        case = Case(stage, chunk=200, seed=rank)
        engine, _ = open_run(rank, size, case, folder, Experts, param_groups=None)
        found = {name: w.clone() for name, w in engine.state_dict().items()}
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_the_first_ranks_weights_and_buffers_count(ranks, stage):
    torch.manual_seed(0)
    expected = Experts().state_dict()
    for answer in ranks.run(seeds_differ, 2, stage):
        for name, weight in answer.items():
            assert torch.equal(weight, expected[name]), name


def models_differ(rank: int, size: int, stage: int, how: str) -> str:
    provider: Callable[[], nn.Module] = Experts
    config: dict[str, Any] = {}
    if rank == 1 and how == "experts":
        provider = lambda: Experts(4)  # noqa: E731
    if rank == 1 and how == "stage":
        config = {"zero_optimization": {"stage": 0}}
    if rank == 1 and how == "chunk size":
        config = {"patrickstar": {"chunk_size": 500}}
    if rank == 1 and how == "lr":
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine, _ = open_run(
                rank,
                size,
                Case(stage, chunk=200),
                folder,
                provider,
                param_groups=None,
                config=config,
                timeout=LONG,
            )
        except PatrickStarError as error:
            assert time.monotonic() - start < LIMIT
            return str(error)
    engine.close()
    return ""


@pytest.mark.parametrize(
    ("stage", "how"), [(2, "experts"), (3, "experts"), (3, "stage"), (3, "chunk size"), (3, "lr")]
)
def test_ranks_with_other_models_or_configs_are_told_at_the_start(ranks, stage, how):
    for answer in ranks.run(models_differ, 2, stage, how):
        assert "on rank 1 and" in answer, "it must not begin"


def budgets_differ(rank: int, size: int) -> tuple[str, float]:
    memory = {"host": "150KiB"} if rank == 1 else {}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine, _ = open_run(
                rank,
                size,
                Case(1, chunk=200, memory=memory),
                folder,
                Experts,
                param_groups=None,
                timeout=LONG,
            )
            try:
                engine.backward(engine(torch.ones(20000, WIDTH), 0))
            finally:
                engine.close()
        except (BudgetError, CommError) as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", 0.0


def test_a_rank_over_its_budget_says_so_and_the_others_do_not_wait_forever(ranks):
    first, second = ranks.run(budgets_differ, 2)
    assert second[0].startswith("BudgetError")
    assert first[0].startswith("CommError") and "rank 1" in first[0]
    assert first[1] < LIMIT
