"""Experts that every rank has for itself, with an all-to-all of the user's between them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import patrickstar
from patrickstar.comm import Communicator
from patrickstar.engine.engine import Engine
from patrickstar.errors import CheckpointError, ConfigError
from tests.rank_pool import RankPool

WIDTH, ROWS, STEPS = 12, 8, 4
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
Weights = dict[str, torch.Tensor]


class Exchange(torch.autograd.Function):
    """Row block i goes to rank i; so does its gradient, back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        come = torch.empty_like(rows)
        dist.all_to_all_single(come, rows.contiguous())
        return come

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        back = torch.empty_like(grads[0])
        dist.all_to_all_single(back, grads[0].contiguous())
        return back


class Experts(nn.Module):
    """A shared layer, and an expert for each rank that half of all rows go to.

    Args:
        name: what the expert is called.
    """

    def __init__(self, rank: int, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(WIDTH, WIDTH)
        with patrickstar.local_to_rank():
            torch.manual_seed(10 + rank)
            self.experts = nn.ModuleDict({name: Expert()})
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (expert,) = self.experts.values()
        x = torch.tanh(self.entry(x))
        return self.norm(x + Exchange.apply(expert(Exchange.apply(x)))).tanh().square().mean()


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.register_buffer("seen", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def by_hand(
    rank: int, size: int, clipping: float, accumulation: int = 1
) -> tuple[list[float], list[float], Weights]:
    """A plain loop: losses, norms and weights of this rank."""
    model = Experts(rank, "mine")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(accumulation):
            loss = model(batch(rank, accumulation * step + micro))
            (loss / accumulation).backward()
        squares = torch.zeros(2, dtype=torch.float64)
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
            parameter.grad /= size
            squares[int("experts" in name)] += parameter.grad.double().square().sum()
        dist.all_reduce(squares[1:])
        norms.append(float(squares.sum().sqrt()))
        if clipping:
            for parameter in model.parameters():
                parameter.grad *= min(clipping / (norms[-1] + 1e-6), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: w.clone() for name, w in model.state_dict().items()}


def start(
    rank: int, stage: int, clipping: float = 0.0, name: str = "mine", **more: Any
) -> tuple[Engine, Any, Communicator]:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": more.pop("accumulation", 1),
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 300, "memory": more.pop("memory", {})},
        **more.pop("config", {}),
    }
    comm = Communicator.open(timeout=20.0)
    provider = more.pop("provider", lambda: Experts(rank, name))
    engine, optimizer = patrickstar.initialize_engine(provider, config, communicator=comm)
    engine.communicator = comm
    return engine, optimizer, comm


def run(engine: Engine, optimizer: Any, rank: int, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    micros = engine.accumulation_steps
    for step in steps:
        for micro in range(micros):
            loss = engine(batch(rank, micros * step + micro))
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(engine.get_global_grad_norm() or 0.0)
    return losses, norms


def ours(
    rank: int, size: int, stage: int, clipping: float, **more: Any
) -> tuple[list[float], list[float], Weights]:
    engine, optimizer, _ = start(rank, stage, clipping, **more)
    found = run(engine, optimizer, rank, range(STEPS))
    weights = {name: w.clone() for name, w in engine.state_dict().items()}
    engine.close()
    return *found, weights


def every_stage(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"by hand": by_hand(rank, size, 0.0)}
    for stage in range(4):
        found[f"stage {stage}"] = ours(rank, size, stage, 0.0)
    return found


def test_experts_of_ranks_train_to_the_bits_of_a_plain_loop_at_every_stage(ranks: RankPool) -> None:
    first, second = ranks.run(every_stage, 2)
    for answer in (first, second):
        losses, _, weights = answer.pop("by hand")
        for stage, (found, _, ours) in answer.items():
            assert found == losses, stage
            assert ours.keys() == weights.keys()
            assert all(torch.equal(ours[name], weights[name]) for name in weights), stage
    name = "experts.mine.up.weight"
    assert not torch.equal(first["stage 3"][2][name], second["stage 3"][2][name])


def clipped(rank: int, size: int) -> list[Any]:
    expected = by_hand(rank, size, 0.02, 2)
    return [expected] + [ours(rank, size, stage, 0.02, accumulation=2) for stage in (1, 3)]


def test_the_norm_counts_every_ranks_experts_once_and_clips_all_alike(ranks: RankPool) -> None:
    first, second = ranks.run(clipped, 2)
    for answer in (first, second):
        (losses, norms, weights), *runs = answer
        assert min(norms) > 0.02, "clipping has to happen"
        assert norms == first[0][1]
        for found, there, ours in runs:
            torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
            torch.testing.assert_close(there, norms, rtol=1e-6, atol=0)
            for name, weight in weights.items():
                torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-6)


def with_a_disk(rank: int, size: int) -> list[Any]:
    found, memory = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            engine, optimizer, _ = start(
                rank, 3, 0.02, memory=memory, config={"bf16": {"enabled": True}}
            )
            engine.reset_peak()
            numbers, weights = run(engine, optimizer, rank, range(STEPS)), engine.state_dict()
            report = engine.memory_report()
            budget = size * int(0.85 * report.tiers["host"].peak)
            memory = {"host": budget, "disk": {"path": folder}}
            found.append((numbers, weights, dict(report.moved)))
            engine.close()
    return found


def test_a_disk_changes_no_bit_of_experts_in_bf16(ranks: RankPool) -> None:
    for free, little in ranks.run(with_a_disk, 2):
        assert free[0] == little[0]
        assert all(torch.equal(little[1][name], weight) for name, weight in free[1].items())
        assert little[2] and not free[2], "the disk has to be used"


def saved(rank: int, size: int, folder: str, name: str) -> tuple[list[float], Weights, Weights]:
    """Three steps, a checkpoint, and a last one; with the weights at the checkpoint."""
    engine, optimizer, _ = start(rank, 2, 0.02, name.format(rank))
    run(engine, optimizer, rank, range(3))
    engine.save_checkpoint(folder)
    before = engine.state_dict()
    losses, _ = run(engine, optimizer, rank, range(3, 4))
    weights = engine.state_dict()
    engine.close()
    return losses, weights, before


def resumed(rank: int, size: int, folder: str, name: str) -> tuple[list[float], Weights]:
    engine, optimizer, _ = start(rank, 3, 0.02, name.format(rank))
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder)
    losses, _ = run(engine, optimizer, rank, range(3, 4))
    weights = {name: w.clone() for name, w in engine.state_dict().items()}
    engine.close()
    return losses, weights


@pytest.mark.parametrize("name", ["mine", "expert{}"])
def test_a_checkpoint_has_the_experts_of_all_ranks(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    expected = ranks.run(saved, 2, str(tmp_path), name)
    for found, there in zip(ranks.run(resumed, 2, str(tmp_path), name), expected, strict=True):
        assert found[0] == there[0]
        assert all(torch.equal(found[1][name], weight) for name, weight in there[1].items())


class BothExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleDict({f"expert{rank}": Expert() for rank in range(2)})


def refused(rank: int, size: int, folder: str) -> list[str]:
    def late() -> nn.Module:
        model = Expert()
        for parameter in model.parameters():
            parameter.allreduce = False
        return model

    def replicated() -> nn.Module:
        with patrickstar.local_to_rank():
            model = Expert()
        for parameter in model.parameters():
            parameter.group_name = "ep_size_1"
        return model

    def copied() -> nn.Module:
        torch.manual_seed(0)
        with patrickstar.local_to_rank():
            return Expert()

    with pytest.warns(UserWarning, match=r"ranks \[0, 1\] have for themselves"):
        start(rank, 2, provider=copied)[0].close()
    messages = []
    for provider in (late, replicated):
        with pytest.raises(ConfigError) as raised:
            start(rank, 3, provider=provider)
        messages.append(str(raised.value))
    engine, _, _ = start(rank, 1, name="mine" if rank else "yours")
    with pytest.raises(CheckpointError) as wrong:
        engine.load_checkpoint(folder)
    engine.close()
    return [*messages, str(wrong.value)]


def test_experts_under_names_of_their_own_go_to_one_rank_and_others_are_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(saved, 2, str(tmp_path), "expert{}")
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "gradient_clipping": 0.0,
    }
    engine, _ = patrickstar.initialize_engine(BothExperts, config)
    engine.load_checkpoint(tmp_path)
    found = engine.state_dict()
    engine.close()
    for _, _, weights in expected:
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    for answer in ranks.run(refused, 2, str(tmp_path)):
        assert "local_to_rank" in answer[0]
        assert "'ep_size_1'" in answer[1]
        assert "expert" in answer[2]
