"""How DeepSpeed's scripts begin: arguments of the command line, and the process group."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import patrickstar as deepspeed
from patrickstar.engine import launch, zero_init
from patrickstar.engine.from_config import settings_from
from tests.rank_pool import RankPool


@pytest.fixture
def ungrouped() -> Iterator[None]:
    """No process group before and none after."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def timeout_of_cpu() -> datetime.timedelta:
    found: datetime.timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    return found


def test_a_parser_gets_deepspeeds_options_beside_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    assert deepspeed.add_config_arguments(parser) is parser
    plain = parser.parse_args([])
    assert vars(plain) == {"steps": 3, "deepspeed": False, "deepspeed_config": None}
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--steps", "5"])
    assert vars(given) == {"steps": 5, "deepspeed": True, "deepspeed_config": "ds.json"}


def test_the_config_comes_from_the_arguments_of_the_script(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**config, "zero_optimization": {"stage": 2}}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, *_ = deepspeed.initialize(args=arguments, model=nn.Linear(8, 1))
    assert engine.gradient_accumulation_steps() == 2
    assert engine.zero_optimization_stage() == 2
    engine.close()


def test_arguments_without_a_config_are_refused() -> None:
    arguments = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args([])
    with pytest.raises(deepspeed.ConfigError, match="config="):
        deepspeed.initialize(args=arguments, model=nn.Linear(8, 1))


@pytest.mark.usefixtures("ungrouped")
def test_a_process_without_a_launcher_is_a_group_of_its_own() -> None:
    deepspeed.init_distributed(timeout=datetime.timedelta(seconds=77))
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    assert "gloo" in dist.get_backend_config() and timeout_of_cpu().total_seconds() == 77
    first = dist.group.WORLD
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=5))
    assert dist.group.WORLD is first and timeout_of_cpu().total_seconds() == 77
    dist.barrier()


@pytest.mark.usefixtures("ungrouped")
def test_no_group_is_made_where_the_script_asks_for_none() -> None:
    deepspeed.init_distributed(dist_init_required=False)
    assert not dist.is_initialized()


def test_an_accelerator_has_its_own_backend_beside_that_of_the_cpu() -> None:
    assert launch.backend_for(None) == "gloo"
    assert launch.backend_for(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_a_model_that_is_built_first_does_not_leave_the_accelerator_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules are built in CPU memory, in the group that the whole run then has."""

    def settings(config: Any) -> Any:
        return replace(settings_from(config), device=torch.device("cuda", 0))

    def asked(backend: str, timeout: Any) -> None:
        raise LookupError(backend)

    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(zero_init, "settings_from", settings)
    monkeypatch.setattr(launch, "join_group", asked)
    with pytest.raises(LookupError, match="cpu:gloo,cuda:nccl"):
        zero_init.begin({"train_batch_size": 2, "zero_optimization": {"stage": 3}})


def meet(rank: int, size: int, how: dict[str, Any], port: int) -> tuple[int, int, float, float]:
    """Rank, ranks, the sum over them, and seconds of the timeout, in a group that this makes."""
    dist.destroy_process_group()
    told = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if not how:
        os.environ.update({name: str(value) for name, value in told.items()})
    else:
        how = {**how, "rank": rank, "world_size": size}
    try:
        deepspeed.init_distributed(timeout=datetime.timedelta(seconds=33), **how)
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total)
        return (
            dist.get_rank(),
            dist.get_world_size(),
            total.item(),
            timeout_of_cpu().total_seconds(),
        )
    finally:
        for name in told:
            os.environ.pop(name, None)


@pytest.mark.parametrize("launched", [True, False], ids=["by a launcher", "by init_method"])
def test_ranks_that_are_told_of_each_other_make_one_group(
    launched: bool, ranks: RankPool, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = {} if launched else {"init_method": f"file://{tmp_path / 'store'}"}
    assert ranks.run(meet, 2, how, port) == [(0, 2, 3.0, 33.0), (1, 2, 3.0, 33.0)]
