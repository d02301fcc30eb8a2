"""`optimizer.state_dict()` has the moments, and they can be gone on with, here and elsewhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.engine.initialize import make_engine
from patrickstar.errors import CheckpointError
from patrickstar.optim import SGD, Adagrad, AdamW
from tests.engine.test_pieces import PIECE, Wide
from tests.engine.test_pieces import batches as tokens
from tests.engine.training import HYPER, loss_of, settings

from .test_interrupts import BUDGET, CHUNK, Squares, batches

KINDS: list[Any] = [
    (AdamW(), torch.optim.AdamW, HYPER),
    (SGD(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (Adagrad(), torch.optim.Adagrad, {"lr": 0.1}),
]


def train(model: Any, optimizer: Any, some: list[dict[str, Any]]) -> list[float]:
    losses = []
    for batch in some:
        loss = loss_of(model(**batch))
        model.backward(loss) if hasattr(model, "global_steps") else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[1].__name__)
def test_it_goes_over_to_an_ordinary_loop_and_back(kind: Any, tmp_path: Path) -> None:
    rule, optimizer_class, hyper = kind
    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK, rule=rule, hyper=hyper)
    some = batches(6)

    torch.manual_seed(0)
    module = Squares()
    plain = optimizer_class(module.parameters(), **hyper, fused=True)
    expected = train(module, plain, some)

    torch.manual_seed(0)
    engine, optimizer = make_engine(Squares, how)
    losses = train(engine, optimizer, some[:2])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    module = Squares()
    module.load_state_dict(engine.state_dict())
    engine.close()

    plain = optimizer_class(module.parameters(), **hyper, fused=True)
    plain.load_state_dict(torch.load(tmp_path / "state.pt"))
    plain.param_groups[0]["fused"] = True  # torch takes a state's word for that too
    losses += train(module, plain, some[2:4])

    engine, optimizer = make_engine(Squares, how)
    engine.load_state_dict(module.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    losses += train(engine, optimizer, some[4:])
    engine.close()
    assert losses == expected


def test_masters_come_along(tmp_path: Path) -> None:
    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK, precision="bf16")
    some = batches(4)
    torch.manual_seed(0)
    engine, optimizer = make_engine(Squares, how)
    expected = train(engine, optimizer, some[:2])
    weights, state = engine.state_dict(), optimizer.state_dict()
    expected += train(engine, optimizer, some[2:])
    engine.close()
    other, its = make_engine(Squares, settings(precision="bf16"))
    other.load_state_dict(weights)
    its.load_state_dict(state)
    assert train(other, its, some[2:]) == expected[2:]
    other.close()


def test_a_parameter_in_pieces_is_one_parameter() -> None:
    how = dataclasses.replace(settings(chunk=PIECE), piece_size=PIECE)
    engine, optimizer = make_engine(Wide, how)
    train(engine, optimizer, tokens(2))
    state = optimizer.state_dict()
    module = Wide()
    assert len(state["param_groups"][0]["params"]) == len(list(module.parameters()))
    weights = engine.state_dict()
    expected = train(engine, optimizer, tokens(1))
    engine.close()
    module.load_state_dict(weights)
    plain = torch.optim.AdamW(module.parameters(), fused=True, **HYPER)
    plain.load_state_dict(state)
    other, its = make_engine(module, how)
    its.load_state_dict(plain.state_dict())
    assert train(other, its, tokens(1)) == expected
    other.close()


def test_parameters_without_a_state_begin_anew(tmp_path: Path) -> None:
    engine, optimizer = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    empty = optimizer.state_dict()
    assert empty["state"] == {}
    train(engine, optimizer, batches(2))
    optimizer.load_state_dict(empty)
    assert optimizer.state_dict()["state"] == {}
    engine.close()


@pytest.mark.parametrize("change", ["groups", "shape", "kind", "no dict"])
def test_what_does_not_fit_is_refused_and_changes_nothing(change: str, tmp_path: Path) -> None:
    engine, optimizer = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK))
    train(engine, optimizer, batches(1))
    other: Any = optimizer.state_dict()
    if change == "groups":
        other["param_groups"][0]["params"].append(99)
    elif change == "shape":
        other["state"][2]["exp_avg"] = torch.zeros(3)
    elif change == "kind":
        other["param_groups"][0]["momentum"] = 0.9
    else:
        other = [1]
    before = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="optimizer's state"):
        optimizer.load_state_dict(other)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, tensors in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in tensors.items())
    engine.close()


def test_frozen_parameters_have_a_number_and_no_state(tmp_path: Path) -> None:
    def provider() -> nn.Module:
        module = Squares()
        module.layers[0].requires_grad_(False)
        return module

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(module.parameters())}]

    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK)
    engine, optimizer = make_engine(provider, how, groups)
    train(engine, optimizer, batches(2))
    module = provider()
    plain = torch.optim.AdamW(module.parameters(), fused=True, **HYPER)
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    assert sorted(plain.state_dict()["state"]) == list(range(2, 8))
    engine.close()
