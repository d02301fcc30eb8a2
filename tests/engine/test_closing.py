"""What is left when an engine is closed, and what cannot be done with one."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar.engine.initialize import make_engine
from patrickstar.errors import ChunkStateError
from tests.engine.test_pieces import PIECE, Wide
from tests.engine.test_pieces import batches as tokens
from tests.engine.training import settings

from .test_interrupts import BUDGET, CHUNK, Squares, batches


def test_after_closing_the_module_is_an_ordinary_one_with_the_trained_values(
    tmp_path: Path,
) -> None:
    module = Squares()
    engine, optimizer = make_engine(module, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    for batch in batches(2):
        engine.backward(engine(**batch))
        optimizer.step()
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    engine.close()
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in expected.items())
    (batch,) = batches(1)
    module(**batch).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_pieces_are_joined_again(tmp_path: Path) -> None:
    how = dataclasses.replace(settings(chunk=PIECE), piece_size=PIECE)
    engine, _ = make_engine(Wide, how)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    module = engine.module
    assert type(module.head.weight) is nn.Parameter
    assert all(torch.equal(module.state_dict()[name], value) for name, value in expected.items())
    assert module(**tokens(1)[0]).isfinite()


def test_parameters_that_do_not_fit_say_that_the_run_is_over(tmp_path: Path) -> None:
    module = Squares(24)
    engine, _ = make_engine(module, settings(host=BUDGET * 3 // 4, disk=tmp_path, chunk=CHUNK))
    engine.close()
    with pytest.raises(ChunkStateError, match="closed"):
        module(**batches(1)[0])


def test_a_closed_engine_trains_no_more_and_says_so(tmp_path: Path) -> None:
    engine, optimizer = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    (batch,) = batches(1)
    loss = engine(**batch)
    engine.close()
    for attempt in (
        lambda: engine(**batch),
        lambda: engine.backward(loss),
        optimizer.step,
        lambda: engine.save_checkpoint(tmp_path / "saved"),
    ):
        with pytest.raises(ChunkStateError, match="this engine is closed"):
            attempt()
    with torch.no_grad(), pytest.raises(ChunkStateError, match="this engine is closed"):
        engine(**batch)


def test_an_engine_cannot_be_copied_but_its_module_can(tmp_path: Path) -> None:
    engine, _ = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ChunkStateError, match="cannot be copied"):
            attempt(engine)
    copied = copy.deepcopy(engine.module)
    weights = engine.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in copied.state_dict().items())
    engine.close()
