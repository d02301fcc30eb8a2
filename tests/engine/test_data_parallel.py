"""Every stage of ZeRO on several ranks: the numbers of one rank, and the bits of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.engine.data_parallel import (
    Case,
    Outcome,
    decayed_and_not,
    gpt,
    micro_batches,
    own_rows,
    train,
)

STAGES = (0, 1, 2, 3)


def every_stage(rank: int, size: int, precision: str) -> dict[str, Outcome]:
    """Stages without and with a disk tier, by name."""
    found = {}
    for stage in STAGES:
        free = found[f"{stage}"] = train(rank, size, Case(stage, precision))
        budget = int(0.85 * free.peak["host"]) * size  # ranks share what a host has
        little = Case(stage, precision, {"host": budget, "spool": True})
        found[f"{stage} on disk"] = train(rank, size, little)
    return found


@pytest.mark.parametrize(
    ("size", "precision", "tolerance"),
    [(1, "fp32", 0), (2, "fp32", 1e-6), (3, "fp32", 1e-6), (4, "fp32", 1e-6), (3, "bf16", 2e-3)],
)
def test_every_stage_has_the_losses_of_one_rank_and_one_set_of_bits(
    ranks, size, precision, tolerance
):
    alone = train(0, 1, Case(0, precision))
    first, *others = ranks.run(every_stage, size, precision)
    for name, outcome in first.items():
        outcome.assert_close(alone, tolerance)
        assert outcome.same_bits(first["0"]), name
        for other in others:
            assert outcome.same_bits(other[name]), f"{name}: ranks differ"
        assert ("on disk" in name) == bool(outcome.moved), "the disk has to be used"


def at_stage_3(rank: int, size: int) -> Outcome:
    return train(rank, size, Case(3))


def with_torch(rank: int, size: int, sharded: bool) -> Outcome:
    """The same run with PyTorch's own data parallelism."""
    case, outcome = Case(), Outcome()
    torch.manual_seed(case.seed)
    module = gpt()
    groups = decayed_and_not(module)
    wrapped = DistributedDataParallel(module)
    hyper: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    optimizer: torch.optim.Optimizer
    if sharded:
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **hyper)
    else:
        optimizer = torch.optim.AdamW(groups, **hyper)
    for batch in micro_batches(case):
        rows = own_rows(batch, rank, size)
        loss = wrapped(rows, rows.roll(-1, 1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double().reshape(1)
        dist.all_reduce(mean)
        outcome.losses.append(float(mean) / size)
        outcome.norms.append(float(norm))
    outcome.weights = {name: w.detach().clone() for name, w in module.state_dict().items()}
    return outcome


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "ZeroRedundancyOptimizer"])
def test_it_trains_as_torchs_own_data_parallelism_does(ranks, sharded):
    theirs = ranks.run(with_torch, 2, sharded)[0]
    ours = ranks.run(at_stage_3, 2)[0]
    ours.assert_close(theirs, 1e-6)
    for name, weight in ours.weights.items():
        # Adam divides by the root of the second moment: where that is tiny, an error is not.
        torch.testing.assert_close(weight, theirs.weights[name], rtol=1e-4, atol=2e-5)


def accumulated(rank: int, size: int) -> dict[str, Outcome]:
    found = {}
    for stage in (0, 2, 3):
        for no_sync in (False, True):
            case = Case(stage, accumulation=3, no_sync=no_sync)
            found[f"{stage} {no_sync}"] = train(rank, size, case)
    return found


def test_gradients_accumulate_with_and_without_synchronisation(ranks):
    alone = train(0, 1, Case(accumulation=3))
    found = ranks.run(accumulated, 2)[0]
    for outcome in found.values():
        outcome.assert_close(alone, 1e-6)
    for no_sync in (False, True):
        assert found[f"0 {no_sync}"].same_bits(found[f"2 {no_sync}"])
        assert found[f"0 {no_sync}"].same_bits(found[f"3 {no_sync}"])
    for stage in (0, 2, 3):
        always, once = (found[f"{stage} {way}"].payload["reduce-scatter"] for way in (False, True))
        assert once * 3 == always, "without synchronisation gradients travel once a step"


def recomputed(rank: int, size: int) -> dict[str, Outcome]:
    modes = (None, "reentrant", "non-reentrant")
    return {str(mode): train(rank, size, Case(3, checkpointing=mode)) for mode in modes}


def test_recomputed_activations_change_no_bit_at_stage_3(ranks):
    found = ranks.run(recomputed, 2)[0]
    assert found["reentrant"].same_bits(found["None"])
    assert found["non-reentrant"].same_bits(found["None"])


def in_groups_of_two(rank: int, size: int) -> dict[int, Outcome]:
    return {stage: train(rank, size, Case(stage, shard_size=2)) for stage in STAGES}


def test_shards_can_be_kept_in_groups_of_ranks(ranks):
    alone = train(0, 1, Case())
    answers = ranks.run(in_groups_of_two, 4)
    for answer in answers:
        for outcome in answer.values():
            outcome.assert_close(alone, 1e-6)
            assert outcome.same_bits(answers[0][0])
