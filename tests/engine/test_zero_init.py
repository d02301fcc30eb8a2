"""Modules built into chunks ahead of `initialize`, and parameters gathered to be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.errors import BudgetError, ConfigError
from tests.rank_pool import RankPool


def network(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def config(tmp_path: Path | None = None, host: str = "64KiB") -> dict[str, Any]:
    ours = {"memory": {"host": host, "disk": str(tmp_path)}} if tmp_path is not None else {}
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "patrickstar": ours,
    }


def losses(module: nn.Module, given: dict[str, Any]) -> list[float]:
    engine, *_ = patrickstar.initialize(model=module, config=given)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(3):
        loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.close()
    return found


def test_what_is_built_inside_lives_in_chunks_and_has_the_usual_random_numbers() -> None:
    with patrickstar.zero.Init():
        module = network()
    assert all(type(p) is ManagedParameter for p in module.parameters())
    for ours, plain in zip(module.parameters(), network().parameters(), strict=True):
        assert torch.equal(ours.detach(), plain.detach())
    outside = network()
    assert all(type(p) is nn.Parameter for p in outside.parameters())


@pytest.mark.parametrize(
    "when", ["with the config", "without a config", "a ready module", "two contexts", "disabled"]
)
def test_a_run_that_picks_it_up_has_the_numbers_of_any_other(when: str, tmp_path: Path) -> None:
    given = config(tmp_path)
    if when == "with the config":
        with patrickstar.zero.Init(config_dict_or_path=given):
            module = network()
    elif when == "without a config":
        with patrickstar.zero.Init(remote_device="cpu", pin_memory=True, dtype=torch.half):
            module = network()
    elif when == "a ready module":
        module = network()
        patrickstar.zero.Init(module=module, config=given)
        assert type(module[0].weight) is ManagedParameter
    elif when == "two contexts":
        module = network()
        with patrickstar.zero.Init(config_dict_or_path=given):
            module[0] = network()[0]
        with patrickstar.zero.Init(config_dict_or_path=given):
            module[2] = network()[2]
    else:
        with patrickstar.zero.Init(enabled=False):
            module = network()
        assert type(module[0].weight) is nn.Parameter
    assert losses(module, given) == losses(network(), config())


def test_a_model_larger_than_memory_is_built_under_its_budget(tmp_path: Path) -> None:
    given = config(tmp_path, host="512KiB")
    given["patrickstar"]["chunk_size"] = 4096
    with patrickstar.zero.Init(config_dict_or_path=given):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(64)))
    engine, *_ = patrickstar.initialize(model=module, config=given)
    assert sum(p.numel() * 4 for p in module.parameters()) > 2 * 512 * 1024
    assert engine.memory_report().tiers["host"].peak <= 512 * 1024
    engine.close()


def test_a_parameter_in_pieces_is_carried_over_to_a_run_without_pieces() -> None:
    given = config()
    with patrickstar.zero.Init(config_dict_or_path={"patrickstar": {"piece_size": 256}}):
        module = network(width=64)
    assert losses(module, given) == losses(network(width=64), config())


def test_a_model_of_another_engine_is_refused() -> None:
    module = network()
    engine, *_ = patrickstar.initialize(model=module, config=config())
    with pytest.raises(ConfigError, match="belongs to another engine"):
        patrickstar.initialize(model=module, config=config())
    assert engine(torch.ones(1, 8)).shape == (1, 4)
    engine.close()


@pytest.mark.parametrize("low", [False, True])
def test_what_is_changed_while_gathered_reaches_chunk_and_master(low: bool, tmp_path: Path) -> None:
    given = {**config(tmp_path), "bf16": {"enabled": low}}
    with patrickstar.zero.Init(config_dict_or_path=given):
        module = network()
    with patrickstar.zero.GatheredParameters(module[0].weight, modifier_rank=0):
        module[0].weight.data.fill_(0.5)
    engine, *_ = patrickstar.initialize(model=module, config=given)
    with patrickstar.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        assert (module[0].weight == 0.5).all()
        nn.init.constant_(module[2].weight, 0.25)
        module[2].bias.data = torch.ones(4, dtype=module[2].bias.dtype)
    for parameter, value in ((module[2].weight, 0.25), (module[2].bias, 1.0)):
        found = patrickstar.utils.safe_get_full_fp32_param(parameter)
        assert found is not None and (found == value).all()
    engine.close()


def test_gathered_parameters_stay_where_they_are_while_others_are_used(tmp_path: Path) -> None:
    given = config(tmp_path, host="160KiB")
    given["patrickstar"]["chunk_size"] = 4096
    with patrickstar.zero.Init(config_dict_or_path=given):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    with torch.no_grad(), patrickstar.zero.GatheredParameters(module[0].weight):
        address = module[0].weight.data_ptr()
        before = module[0].weight.detach().clone()
        module(torch.ones(1, 64))
        assert module[0].weight.data_ptr() == address
        assert torch.equal(module[0].weight.detach(), before)


def test_more_than_the_budget_holds_is_gathered_one_by_one(tmp_path: Path) -> None:
    given = config(tmp_path, host="160KiB")
    given["patrickstar"]["chunk_size"] = 4096
    with patrickstar.zero.Init(config_dict_or_path=given):
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    engine, *_ = patrickstar.initialize(model=module, config=given)
    with patrickstar.zero.GatheredParameters(module.parameters(), modifier_rank=0):
        for index, parameter in enumerate(module.parameters()):
            nn.init.constant_(parameter, float(index))
    assert [p.detach().mean().item() for p in module.parameters()] == [float(i) for i in range(32)]
    assert engine.memory_report().tiers["host"].peak <= 160 * 1024
    engine.close()


@pytest.mark.parametrize("budget", [False, True])
def test_two_modules_of_one_context_live_on_apart(budget: bool, tmp_path: Path) -> None:
    """One is carried to another manager (`budget`) or taken over; the other keeps its weights."""
    with patrickstar.zero.Init():
        teacher, student = network(), network()
    expected = network()
    assert losses(student, config(tmp_path if budget else None)) == losses(network(), config())
    x = torch.randn(4, 8)
    assert torch.equal(teacher(x), expected(x))


def on_ranks(rank: int, size: int, stage: int, init: bool, folder: str) -> Any:
    """A run whose first rank has changed a weight before it began; its losses and weights."""
    memory = {"host": "256KiB", "disk": f"{folder}/{rank}"}
    given = {
        "train_batch_size": 4 * size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"memory": memory, "chunk_size": 128},
    }
    with patrickstar.zero.Init(config_dict_or_path=given, enabled=init):
        module = network()
    with patrickstar.zero.GatheredParameters(module[2].weight, modifier_rank=0), torch.no_grad():
        if rank == 0 or not init:  # ordinary parameters are changed on all ranks
            module[2].weight.fill_(0.25)
    engine, *_ = patrickstar.initialize(model=module, config=given)
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        loss = engine(torch.randn(4, 8, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    weights = {name: weight.clone() for name, weight in engine.state_dict().items()}
    engine.close()
    return found, weights


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_share_what_is_built_have_the_numbers_of_any_other(
    stage: int, ranks: RankPool, tmp_path: Path
) -> None:
    ahead = ranks.run(on_ranks, 2, stage, True, str(tmp_path))
    ordinary = ranks.run(on_ranks, 2, stage, False, str(tmp_path))
    for (losses_ahead, weights), (expected, others) in zip(ahead, ordinary, strict=True):
        assert losses_ahead == expected
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_plain_parameters_and_a_disabled_context_are_left_alone() -> None:
    module = network()
    with patrickstar.zero.GatheredParameters(module.parameters()):
        assert type(module[0].weight) is nn.Parameter
    with patrickstar.zero.GatheredParameters(module[0].weight, enabled=False):
        pass


def test_a_budget_too_small_to_build_in_says_so(tmp_path: Path) -> None:
    given = config(tmp_path, host="1KiB")
    with pytest.raises(BudgetError), patrickstar.zero.Init(config_dict_or_path=given):
        network(width=4096)
