"""Parameters larger than a budget are used in pieces."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import patrickstar
from patrickstar.engine.initialize import make_engine
from patrickstar.engine.pieces import PiecedParameter, PiecesError
from patrickstar.errors import BudgetError

from .training import run_engine, run_plain, settings

ROWS, WIDTH, PIECE = 2048, 64, 16384


class Wide(nn.Module):
    """An embedding and a head of 512 KiB each, tied or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)
        if tied:
            self.head.weight = self.embed.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            module.weight.data[3].zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def batches(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [{"ids": torch.randint(0, ROWS, (1, 4), generator=generator)} for _ in range(count)]


def pieced(**how: Any) -> Any:
    return dataclasses.replace(settings(chunk=PIECE, **how), piece_size=PIECE)


@pytest.mark.parametrize("tied", [False, True])
def test_a_parameter_larger_than_the_budget_is_used_in_pieces(tied: bool, tmp_path: Path) -> None:
    def provider() -> nn.Module:
        return Wide(tied)

    # Gradients of tied pieces wait for their second half: one parameter more than untied.
    whole = ROWS * WIDTH * 4 * (2 if tied else 1)
    expected = run_plain(provider, batches(5))
    unlimited = run_engine(provider, batches(5), pieced())
    torch.testing.assert_close(unlimited.losses, expected.losses, rtol=1e-6, atol=1e-7)
    for how in (
        pieced(host=int(whole * 0.98), disk=tmp_path),
        pieced(host=2 * whole, disk=tmp_path),
        pieced(device=int(whole * 0.98), host=2 * whole, disk=tmp_path),
        pieced(device=int(whole * 0.98), host=4 * whole, disk=tmp_path, accelerator=True),
    ):
        got = run_engine(provider, batches(5), how, keep_gradients=False)
        got.gradients = unlimited.gradients
        got.assert_same(unlimited)


def test_pieces_start_from_the_same_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Wide().state_dict()
    torch.manual_seed(0)
    engine, _ = make_engine(Wide, pieced(host=500_000, disk=tmp_path))
    assert isinstance(engine.embed.weight, PiecedParameter)
    assert engine.embed.weight.shape == (ROWS, WIDTH)
    found = engine.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    engine.close()


def test_a_lookup_leaves_pieces_without_a_row_where_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, _ = make_engine(Wide, pieced(host=900_000, disk=tmp_path))
    for aligned in engine._state.aligned:
        engine.memory.evict(aligned.parameter)
    before = engine.memory_report().moved.get("disk->host", 0)
    with torch.no_grad():
        engine.embed(torch.tensor([[1, 2, 5]]))
    moved = engine.memory_report().moved["disk->host"] - before
    assert moved == PIECE * 4
    engine.close()


def test_weights_are_loaded_into_pieces(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = Wide().state_dict()
    engine, _ = make_engine(Wide, pieced(host=900_000, disk=tmp_path))
    engine.load_state_dict(other)
    found = engine.state_dict()
    assert all(torch.equal(found[name], other[name]) for name in other)
    engine.close()


def test_operators_that_make_new_tensors_get_the_whole_parameter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Wide().head.weight
    torch.manual_seed(0)
    engine, _ = make_engine(Wide, pieced(host=2 * ROWS * WIDTH * 4, disk=tmp_path))
    weight, x = engine.head.weight, torch.ones(ROWS)
    assert torch.equal(x @ weight, x @ expected)
    assert torch.equal(weight * 2, expected * 2)
    assert weight.norm() == expected.norm()
    assert torch.equal(weight.clone(), expected)
    (weight.square().sum() + (x @ weight).sum()).backward()
    (expected.square().sum() + (x @ expected).sum()).backward()
    assert torch.equal(weight.grad, expected.grad)
    engine.close()


def test_the_whole_of_a_parameter_in_pieces_is_held_to_the_budget(tmp_path: Path) -> None:
    engine, _ = make_engine(Wide, pieced(host=500_000, disk=tmp_path))
    with pytest.raises(PiecesError, match=r"clone.*\(2048, 64\).*more than the host budget"):
        engine.head.weight.clone()
    engine.close()


@pytest.mark.parametrize("view", ["t", "flatten", "numpy", "contiguous"])
def test_a_view_of_the_whole_is_refused_by_name(view: str) -> None:
    engine, _ = make_engine(Wide, pieced())
    with torch.no_grad(), pytest.raises(PiecesError, match=rf"{view}.*\(2048, 64\).*piece_size"):
        getattr(engine.head.weight.data, view)()
    engine.close()


class Truncated(Wide):
    def _init(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.trunc_normal_(parameter, std=0.02)


def test_a_truncated_normal_draws_the_numbers_of_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = Truncated().state_dict()
    torch.manual_seed(0)
    engine, _ = make_engine(Truncated, pieced(host=900_000, disk=tmp_path))
    assert isinstance(engine.head.weight, PiecedParameter)
    found = engine.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    engine.close()


def test_a_budget_too_small_for_one_whole_parameter_names_the_piece_size(tmp_path: Path) -> None:
    whole = ROWS * WIDTH * 4
    with pytest.raises(BudgetError):
        make_engine(Wide, settings(host=int(whole * 0.98), disk=tmp_path))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lookup_in_pieces_has_the_dtype_of_training(precision: str, tmp_path: Path) -> None:
    def provider() -> nn.Module:
        return Wide(tied=True)

    how = pieced(precision=precision, host=1 << 20, disk=tmp_path)
    free = pieced(precision=precision)
    run_engine(provider, batches(3), free).assert_same(run_engine(provider, batches(3), how))


def test_a_copy_that_is_made_while_building_is_in_pieces_too() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = nn.Linear(WIDTH, ROWS)
            self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = F.one_hot(ids % WIDTH, WIDTH).float()
            return sum(layer(x).square().mean() for layer in self.layers)  # type: ignore[return-value]

    engine, _ = make_engine(Twice, pieced())
    first, second = (layer.weight for layer in engine.module.layers)
    assert (
        type(first) is type(second) is PiecedParameter and first.pieces[0] is not second.pieces[0]
    )
    later = copy.deepcopy(first)
    assert type(later) is nn.Parameter
    engine.close()
    run_plain(Twice, batches(2)).assert_same(
        run_engine(Twice, batches(2), dataclasses.replace(pieced(), piece_size=1 << 20))
    )


@pytest.mark.parametrize("device", ["3MiB", "6MiB"])
def test_the_piece_size_that_a_refusal_names_for_a_wide_parameter_works(device: str) -> None:
    class Widest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20_000, 64)
            self.up, self.down = nn.Linear(64, 8192), nn.Linear(8192, 1)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(self.table(rows)).relu()).square().mean()

    ours: dict[str, Any] = {"memory": {"device": device, "host": "64MiB"}}
    with pytest.raises(BudgetError, match=r"'table\.weight'") as refused:
        patrickstar.initialize_engine(Widest, {"patrickstar": ours})
    (named,) = re.findall(r"piece_size to (\d+)", str(refused.value))
    engine, optimizer = patrickstar.initialize_engine(
        Widest, {"patrickstar": {**ours, "piece_size": int(named)}}
    )
    for _ in range(2):
        engine.backward(engine(torch.arange(8)))
        optimizer.step()
    engine.close()
