"""The ranks of a host stay inside its budgets together, whomever they are connected with."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest import mock

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import patrickstar
from patrickstar.comm import Communicator
from tests.rank_pool import RankPool

HOST, DISK = 1_000_001, 2_000_003  # no number of ranks divides them

Budgets = tuple[int, int]


def budgets(module: Any) -> Budgets:
    """Of the tiers that the parameters of `module` live in: host and disk."""
    *_, host, disk = next(module.parameters())._home.manager.tiers
    return host.capacity, disk.spool.capacity


def given(size: int, stage: int, folder: str) -> dict[str, Any]:
    disk = {"path": folder, "size": DISK}
    return {
        "train_batch_size": size,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"memory": {"host": HOST, "disk": disk}},
    }


def trained(rank: int, size: int, folder: str, hosts: str) -> Budgets:
    with (
        mock.patch.object(socket, "gethostname", return_value=hosts[rank]),
        Communicator.open(timeout=20) as comm,
    ):
        engine, _ = patrickstar.initialize_engine(
            lambda: nn.Linear(3, 3), given(size, 1, folder), communicator=comm
        )
        found = budgets(engine.module)
        engine.close()
    return found


@pytest.mark.parametrize("hosts", ["aaa", "aba"])
def test_ranks_share_the_budgets_of_their_host(ranks: RankPool, tmp_path: Any, hosts: str) -> None:
    found = ranks.run(trained, 3, str(tmp_path), hosts)
    for host in set(hosts):
        here = [found[rank] for rank in range(3) if hosts[rank] == host]
        for whole, parts in zip((HOST, DISK), zip(*here, strict=True), strict=True):
            assert whole - len(here) < sum(parts) <= whole


def on_a_mesh(rank: int, size: int, folder: str) -> Budgets:
    """Two by two ranks of one host, of which the engine connects two and two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(size)}),
        Communicator.from_mesh(mesh, shard="data") as comm,
    ):
        engine, _ = patrickstar.initialize_engine(
            lambda: nn.Linear(3, 3), given(2, 1, folder), communicator=comm
        )
        found = budgets(engine.module)
        engine.close()
    return found


def test_ranks_that_hold_other_parts_of_the_model_count(ranks: RankPool, tmp_path: Any) -> None:
    assert ranks.run(on_a_mesh, 4, str(tmp_path)) == [(HOST // 4, DISK // 4)] * 4


def built_ahead(rank: int, size: int, folder: str, stage: int) -> Budgets:
    config = given(size, stage, folder)
    with patrickstar.zero.Init(config_dict_or_path=config):
        module = nn.Linear(3, 3)
    found = budgets(module)
    patrickstar.initialize(model=module, config=config)[0].close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_built_ahead_has_a_share_too(
    ranks: RankPool, tmp_path: Any, stage: int
) -> None:
    assert ranks.run(built_ahead, 2, str(tmp_path), stage) == [(HOST // 2, DISK // 2)] * 2
