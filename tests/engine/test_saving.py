"""A run that is saved and resumed gives the bits of one that went through."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.memory import Fifo, Lru
from patrickstar.optim import SGD, Adagrad, DynamicLossScale, WarmupLR

from .test_pieces import PIECE, Wide
from .test_pieces import batches as token_batches
from .test_training import MIB, Mlp, numbers
from .training import loss_of, settings

Provider = Callable[[], nn.Module]


class Noisy(Mlp):
    """With dropout, a buffer that training changes, a frozen, and a seldom used parameter."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__(width=32, depth=2)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.seldom = nn.Linear(32, 32)
        self.never = nn.Parameter(torch.ones(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.frozen(self.norm(x)), 0.2)
        if int(self.calls) % 3 == 0:
            x = x + self.seldom(x)
        return super().forward(x)


def engine_for(provider: Provider, how: RunSettings) -> tuple[Engine, ChunkedOptimizer]:
    torch.manual_seed(0)
    return make_engine(provider, how)


def train(engine: Engine, optimizer: ChunkedOptimizer, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_of(engine(**batch))
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def everything(engine: Engine) -> dict[str, Any]:
    """Weights, masters and moments by name, and the counters."""
    state = engine._state
    found: dict[str, Any] = {k: v.clone() for k, v in engine.state_dict().items()}
    for aligned in state.aligned:
        for chunk in aligned.chunks():
            if chunk.kind in ("parameter", "gradient"):
                continue
            from patrickstar.memory import Access, Use

            with state.manager.use([Use(chunk.id, Access.READ, state.update_tier)]):
                flat = state.manager.tensor(chunk, state.update_tier)
                for slot in aligned.slots:
                    values = flat[slot.offset : slot.offset + slot.numel]
                    found[f"{chunk.kind} of {slot.name}"] = values.clone()
    for _, slot in state.slots.values():
        found[f"step of {slot.name}"] = slot.step
    for key in ("global_steps", "micro_steps", "skipped_steps"):
        found[key] = getattr(engine, key)
    found["lr"] = engine.get_lr()
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        same = torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else None
        assert same if same is not None else value == theirs[key], key


def through(provider: Provider, how: RunSettings, batches: Any) -> tuple[list[float], Any]:
    engine, optimizer = engine_for(provider, how)
    try:
        return train(engine, optimizer, batches), everything(engine)
    finally:
        engine.close()


def resumed(
    provider: Provider,
    how: RunSettings,
    batches: Any,
    after: int,
    folder: Path,
    then: RunSettings | None = None,
) -> tuple[list[float], Any]:
    """Train `after` batches, save, forget everything, load into another engine and go on."""
    engine, optimizer = engine_for(provider, how)
    losses = train(engine, optimizer, batches[:after])
    engine.save_checkpoint(folder, client_state={"epoch": (1, 2)})
    engine.close()
    torch.manual_seed(99)
    random.seed(99)
    numpy.random.seed(99)
    engine, optimizer = make_engine(provider, then or how)
    try:
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / f"global_step{engine.global_steps}")
        assert client == {"epoch": (1, 2)}
        return losses + train(engine, optimizer, batches[after:]), everything(engine)
    finally:
        engine.close()


def budgets(tmp_path: Path, **how: Any) -> list[RunSettings]:
    return [
        settings(chunk=9000, **how),
        settings(host=1 * MIB, disk=tmp_path, chunk=9000, **how),
        settings(device=int(0.9 * MIB), host=1 * MIB, disk=tmp_path, chunk=9000, **how),
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    precision: str, budget: int, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 64)
    how = budgets(tmp_path, precision=precision, clipping=0.5)[budget]
    expected = through(Mlp, how, batches)
    got = resumed(Mlp, how, batches, 3, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_in_another_budget_and_chunk_size(precision: str, tmp_path: Path) -> None:
    batches = numbers(6, 8, 64)
    small = settings(precision=precision, host=1 * MIB, disk=tmp_path, chunk=9000)
    large = settings(precision=precision, chunk=40000)
    expected = through(Mlp, large, batches)
    for first, second in ((small, large), (large, small)):
        got = resumed(Mlp, first, batches, 2, tmp_path / "ckpt", second)
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


@pytest.mark.parametrize("policy", [Lru(), Fifo()], ids=["lru", "fifo"])
def test_a_run_without_plans_resumes_too(policy: Any, tmp_path: Path) -> None:
    batches = numbers(4, 8, 64)
    how = settings(host=1 * MIB, disk=tmp_path, chunk=9000, policy=policy, plan=False)
    expected = through(Mlp, how, batches)
    got = resumed(Mlp, how, batches, 2, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("after", [1, 3, 4, 6])
def test_a_run_resumes_in_the_middle_of_an_accumulation(after: int, tmp_path: Path) -> None:
    batches = numbers(8, 8, 64)
    for how in budgets(tmp_path, precision="bf16", accumulation=4, clipping=0.1):
        expected = through(Mlp, how, batches)
        got = resumed(Mlp, how, batches, after, tmp_path / "ckpt", how)
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_dropout_buffers_frozen_and_seldom_used_parameters_survive(
    after: int, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 32)
    how = settings(host=1 * MIB, disk=tmp_path, chunk=2000)
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, after, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_in_pieces_are_stored_whole(
    tied: bool, accumulation: int, tmp_path: Path
) -> None:
    def provider() -> nn.Module:
        return Wide(tied)

    given = token_batches(5)
    whole = settings(accumulation=accumulation)
    in_pieces = dataclasses.replace(
        settings(chunk=PIECE, accumulation=accumulation), piece_size=PIECE
    )
    other_pieces = dataclasses.replace(in_pieces, piece_size=2 * PIECE, chunk_limit=2 * PIECE)
    expected = through(provider, in_pieces, given)
    got = resumed(provider, in_pieces, given, 3, tmp_path / "a")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])
    for first, second in ((whole, in_pieces), (in_pieces, whole), (in_pieces, other_pieces)):
        engine, optimizer = engine_for(provider, first)
        train(engine, optimizer, given[:3])
        engine.save_checkpoint(tmp_path / "b")
        before = {k: v.clone() for k, v in engine.state_dict().items()}
        engine.close()
        engine, _ = make_engine(provider, second)
        engine.load_checkpoint(tmp_path / "b")
        for name, weight in engine.state_dict().items():
            assert torch.equal(weight, before[name]), name
        engine.close()


@pytest.mark.parametrize(
    ("rule", "hyper"),
    [(SGD(), {"lr": 1e-2, "momentum": 0.9}), (Adagrad(), {"lr": 1e-2})],
    ids=["SGD", "Adagrad"],
)
def test_other_optimizers_resume_too(rule: Any, hyper: Any, tmp_path: Path) -> None:
    batches = numbers(5, 8, 32)
    how = settings(chunk=2000, rule=rule, hyper=hyper)
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 2, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


def test_the_learning_rate_schedule_goes_on(tmp_path: Path) -> None:
    batches = numbers(6, 8, 32)
    how = dataclasses.replace(
        settings(chunk=2000),
        make_scheduler=lambda optimizer: WarmupLR(optimizer, 0.0, 1e-2, 10, "linear"),
    )
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 3, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


class Tiny(nn.Module):
    """Small enough for 16-bit floats on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().square().mean()


def test_the_loss_scale_and_its_overflows_resume(tmp_path: Path) -> None:
    def how() -> RunSettings:
        made = settings(precision="fp16")
        made.precision.scaler = DynamicLossScale(initial_scale_power=20, loss_scale_window=2)
        return made

    batches = numbers(10, 16)
    expected = through(Tiny, how(), batches)
    assert expected[1]["skipped_steps"] > 1
    for after in (1, 5):
        got = resumed(Tiny, how(), batches, after, tmp_path, how())
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


def test_saving_right_after_loading_gives_the_same_checkpoint(tmp_path: Path) -> None:
    how = settings(precision="bf16", chunk=2000, accumulation=2)
    engine, optimizer = engine_for(Noisy, how)
    train(engine, optimizer, numbers(3, 8, 32))
    engine.save_checkpoint(tmp_path / "a")
    engine.load_checkpoint(tmp_path / "a")  # right after saving
    engine.save_checkpoint(tmp_path / "b")
    engine.close()
    engine, _ = make_engine(Noisy, how)
    engine.load_checkpoint(tmp_path / "a")
    engine.save_checkpoint(tmp_path / "c")
    engine.close()
    names = sorted(p.name for p in (tmp_path / "a/global_step1").iterdir())
    assert len(names) == 5
    for other in ("b", "c"):
        for name in names:
            ours, theirs = (tmp_path / f / "global_step1" / name for f in ("a", other))
            assert ours.read_bytes() == theirs.read_bytes(), (other, name)


def test_a_model_that_was_not_trained_yet_is_saved_too(tmp_path: Path) -> None:
    batches = numbers(3, 8, 32)
    how = settings(chunk=2000, precision="bf16")
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 0, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


def test_weights_changed_by_hand_before_saving_are_those_that_training_goes_on_with(
    tmp_path: Path,
) -> None:
    how = settings(chunk=2000, precision="bf16")
    batches = numbers(4, 8, 32)

    def change(engine: Engine) -> None:
        with torch.no_grad():
            engine.get_parameter("head.weight").mul_(1.5)

    engine, optimizer = engine_for(Noisy, how)
    losses = train(engine, optimizer, batches[:2])
    change(engine)
    losses += train(engine, optimizer, batches[2:])
    expected = everything(engine)
    engine.close()
    engine, optimizer = engine_for(Noisy, how)
    train(engine, optimizer, batches[:2])
    change(engine)
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine, optimizer = make_engine(Noisy, how)
    engine.load_checkpoint(tmp_path)
    assert train(engine, optimizer, batches[2:]) == losses[2:]
    assert_same(everything(engine), expected)
    engine.close()
