"""Optimizers that need whole tensors, on several ranks: stage 0 trains, others say why not."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch import nn

from patrickstar.errors import ConfigError
from tests.engine.data_parallel import Case, Outcome, open_run, train
from tests.rank_pool import RankPool

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}


def run(rank: int, size: int, optimizer: dict[str, Any]) -> Outcome:
    return train(rank, size, Case(0), config=optimizer, param_groups=None)


@pytest.mark.parametrize("optimizer", [LAMB, MUON], ids=["Lamb", "Muon"])
def test_at_stage_0_it_trains_as_on_one_rank(ranks: RankPool, optimizer: dict[str, Any]) -> None:
    alone = run(0, 1, optimizer)
    for outcome in ranks.run(run, 2, optimizer):
        outcome.assert_close(alone, 1e-5)


def refused(rank: int, size: int, stage: int, optimizer: dict[str, Any]) -> str:
    def never() -> nn.Module:
        raise AssertionError("a model is built that cannot be trained")

    with tempfile.TemporaryDirectory() as folder:
        try:
            open_run(rank, size, Case(stage), folder, never, config=optimizer, param_groups=None)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("stage", "optimizer"), [(1, LAMB), (2, MUON), (3, LAMB)])
def test_from_stage_1_it_is_refused_before_the_model_is_built(
    ranks: RankPool, stage: int, optimizer: dict[str, Any]
) -> None:
    for message in ranks.run(refused, 2, stage, optimizer):
        assert message.startswith(optimizer["optimizer"]["type"])
        assert "use zero_optimization.stage 0" in message
