"""A parameter that is unfrozen too late is named, not left behind in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar.engine.initialize import make_engine
from patrickstar.errors import ConfigError
from tests.engine.test_pieces import PIECE, Wide
from tests.engine.test_pieces import batches as tokens
from tests.engine.training import HYPER, run_plain, settings

from .test_interrupts import BUDGET, CHUNK, Squares, batches


def half_frozen() -> nn.Module:
    module = Squares()
    module.layers[0].requires_grad_(False)
    return module


def test_a_parameter_that_is_unfrozen_later_is_refused_at_the_next_step(tmp_path: Path) -> None:
    engine, optimizer = make_engine(half_frozen, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    first, second = batches(2)
    engine.backward(engine(**first))
    optimizer.step()
    engine.layers[0].requires_grad_(True)
    engine.backward(engine(**second))
    with pytest.raises(ConfigError, match=r"2 parameters were frozen.*'layers.0.weight'.*freeze"):
        optimizer.step()
    engine.layers[0].requires_grad_(False)
    optimizer.step()
    assert engine.global_steps == 2
    engine.close()


def test_pieces_that_are_unfrozen_later_are_refused_too() -> None:
    def provider() -> nn.Module:
        module = Wide()
        module.head.weight.requires_grad = False
        return module

    how = dataclasses.replace(settings(chunk=PIECE), piece_size=PIECE)
    engine, optimizer = make_engine(provider, how)
    engine.head.weight.requires_grad = True
    engine.backward(engine(**tokens(1)[0]))
    with pytest.raises(ConfigError, match="frozen when the engine was made"):
        optimizer.step()
    engine.close()


def test_what_is_frozen_after_the_engine_was_made_can_be_unfrozen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Squares()
    plain = torch.optim.AdamW(module.parameters(), fused=True, **HYPER)
    torch.manual_seed(0)
    engine, optimizer = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    for number, batch in enumerate(batches(4)):
        for model in (module, engine.module):
            model.layers[0].requires_grad_(number >= 2)
        loss, expected = engine(**batch), module(**batch)
        assert loss.item() == expected.item()
        engine.backward(loss)
        expected.backward()
        optimizer.step()
        plain.step()
        plain.zero_grad()
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    engine.close()


def test_a_parameter_in_no_group_may_require_a_gradient(tmp_path: Path) -> None:
    def groups(module: nn.Module) -> list[dict[str, object]]:
        return [{"params": list(module.layers[2:].parameters())}]

    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK)
    engine, optimizer = make_engine(Squares, how, groups)
    engine.backward(engine(**batches(1)[0]))
    optimizer.step()
    assert run_plain(Squares, batches(1), groups=groups).losses
    engine.close()
