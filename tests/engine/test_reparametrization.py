"""Reparametrizations that make new parameters of old ones while the model is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.training import run_engine, run_plain, settings

WIDTH, CHUNK, BUDGET = 32, 2048, 1 << 17


class TwoLayers(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first = wrap(nn.Linear(WIDTH, WIDTH))
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


class Copies(nn.Module):
    """A second parameter that starts from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(self.layer.weight.detach().clone())
        self.frozen = nn.Parameter(self.layer.bias.data * 2, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) @ self.extra + self.frozen).square().mean()


def weight_norm_of_old() -> nn.Module:
    return TwoLayers(nn.utils.weight_norm)


def weight_norm() -> nn.Module:
    return TwoLayers(nn.utils.parametrizations.weight_norm)


def spectral_norm() -> nn.Module:
    return TwoLayers(nn.utils.parametrizations.spectral_norm)


class ViewOfConstruction(nn.Module):
    """It keeps a view of a weight as it was while the model was built, until its first forward.

    So does `nn.utils.spectral_norm`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.start: torch.Tensor | None = self.layer.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.start = None
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def test_a_view_from_construction_may_die_in_the_first_iteration(tmp_path: Path) -> None:
    batches = [{"x": torch.ones(4, WIDTH)}] * 2
    how = settings(device=BUDGET, host=BUDGET, disk=tmp_path, chunk=CHUNK)
    run_engine(ViewOfConstruction, batches, how).assert_same(run_plain(ViewOfConstruction, batches))


@pytest.mark.parametrize("provider", [weight_norm_of_old, weight_norm, spectral_norm, Copies])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_reparametrized_model_is_built_into_chunks(
    provider: Callable[[], nn.Module], tmp_path: Path
) -> None:
    draw = torch.Generator().manual_seed(1)
    batches = [{"x": torch.randn(4, WIDTH, generator=draw)} for _ in range(3)]
    plain = run_plain(provider, batches)
    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK)
    plain.assert_same(run_engine(provider, batches, how))
    plain.assert_same(run_engine(_ready(provider), batches, how))


def _ready(provider: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model, made before it is given to the engine."""
    module: list[nn.Module] = []
    torch.manual_seed(0)
    module.append(provider())
    return module.pop
