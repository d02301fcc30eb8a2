"""Uses of a managed model that once gave other numbers than an ordinary loop, or none."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import BudgetError, ConfigError, SpoolError
from patrickstar.memory import DiskTier
from tests.engine.training import HYPER, run_engine, run_plain, settings

WIDTH, CHUNK, BUDGET = 32, 2048, 1 << 17


class Squares(nn.Module):
    """Layers with a loss that any output has."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


class GradientPenalty(Squares):
    """The gradient by the input is part of the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = self.layers(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return slope.square().mean() + out.square()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(4, WIDTH, generator=draw)} for _ in range(count)]


def managed(disk: Path, clipping: float = 0.0) -> tuple[Engine, ChunkedOptimizer]:
    torch.manual_seed(0)
    how = settings(host=BUDGET, disk=disk, chunk=CHUNK, clipping=clipping)
    return make_engine(Squares, how)


def ordinary() -> tuple[Squares, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = Squares()
    return module, torch.optim.AdamW(module.parameters(), fused=True, **HYPER)


def assert_same_weights(engine: Engine, module: nn.Module) -> None:
    weights = engine.state_dict()
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_a_provider_that_cannot_be_called_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match=r"model_provider is 5; pass a callable"):
        make_engine(5, settings())  # type: ignore[arg-type]


def test_an_evaluation_in_inference_mode_changes_nothing(tmp_path: Path) -> None:
    engine, _ = managed(tmp_path)
    module, _ = ordinary()
    (batch,) = batches(1)
    with torch.inference_mode():
        assert torch.equal(engine(**batch), module(**batch))
        assert torch.equal(engine.layers[0].weight[1:], module.layers[0].weight[1:])
    assert_same_weights(engine, module)
    engine.close()


def test_a_loss_with_a_gradient_in_it_trains_as_in_an_ordinary_loop(tmp_path: Path) -> None:
    plain = run_plain(GradientPenalty, batches(4))
    how = settings(host=4 * BUDGET, disk=tmp_path, chunk=CHUNK)
    plain.assert_same(run_engine(GradientPenalty, batches(4), how))


def test_clipping_sees_gradients_that_were_changed_in_place(tmp_path: Path) -> None:
    engine, optimizer = managed(tmp_path, clipping=0.01)
    module, plain = ordinary()
    for batch in batches(3):
        engine.backward(engine(**batch))
        module(**batch).backward()
        for trained in (engine, module):
            for parameter in trained.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(7.0)
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
        plain.step()
        plain.zero_grad()
        assert engine.get_global_grad_norm() == norm.item()
    assert_same_weights(engine, module)
    engine.close()


def test_set_on_a_parameter_changes_what_is_trained(tmp_path: Path) -> None:
    engine, optimizer = managed(tmp_path)
    module, plain = ordinary()
    new = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)) / 8
    with torch.no_grad():
        for trained in (engine, module):
            next(trained.parameters()).set_(new.clone())
    for batch in batches(3):
        loss, expected = engine(**batch), module(**batch)
        engine.backward(loss)
        optimizer.step()
        expected.backward()
        plain.step()
        plain.zero_grad()
        assert loss.item() == expected.item()
    assert_same_weights(engine, module)
    engine.close()


def test_set_to_a_part_of_a_storage_is_refused(tmp_path: Path) -> None:
    engine, _ = managed(tmp_path)
    with torch.no_grad(), pytest.raises(ValueError, match="lives in a chunk"):
        next(engine.parameters()).set_(torch.zeros(8).untyped_storage())
    engine.close()


def test_an_orthogonal_parametrization_is_built_into_chunks(tmp_path: Path) -> None:
    def provide() -> nn.Module:
        module = Squares(2)
        nn.utils.parametrizations.orthogonal(module.layers[0])
        return module

    plain = run_plain(provide, batches(3))
    how = settings(host=4 * BUDGET, disk=tmp_path, chunk=CHUNK)
    plain.assert_same(run_engine(provide, batches(3), how))


def test_a_parameter_group_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    engine, optimizer = managed(tmp_path)
    with pytest.raises(ConfigError, match="param_groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    engine.close()


def test_a_disk_budget_below_the_state_is_refused_before_the_run(tmp_path: Path) -> None:
    how = settings(host=BUDGET, chunk=CHUNK)
    with pytest.raises(SpoolError, match=r"disk budget of .* is too small: .* are needed"):
        make_engine(lambda: Squares(24), dataclasses.replace(how, disk=(tmp_path, 200_000)))


def test_a_disk_smaller_than_the_state_does_if_memory_holds_the_rest(tmp_path: Path) -> None:
    plain = run_plain(lambda: Squares(24), batches(4))
    how = settings(host=2 * BUDGET, chunk=CHUNK)
    small = dataclasses.replace(how, disk=(tmp_path, 640 << 10))
    plain.assert_same(run_engine(lambda: Squares(24), batches(4), small))


def test_a_disk_that_would_be_too_small_at_the_second_step_is_refused_at_the_first(
    tmp_path: Path,
) -> None:
    how = settings(host=2 * BUDGET, chunk=CHUNK)
    model = lambda: Squares(24)  # noqa: E731
    engine, optimizer = make_engine(model, dataclasses.replace(how, disk=(tmp_path, 512 << 10)))
    engine.backward(engine(**batches(1)[0]))
    with pytest.raises(BudgetError, match=r"disk budget of 512\.00 KiB is too small") as caught:
        optimizer.step()
    assert (caught.value.tier, engine.global_steps) == ("disk", 0)
    engine.close()
    named = dataclasses.replace(how, disk=(tmp_path, caught.value.smallest))
    run_plain(model, batches(2)).assert_same(run_engine(model, batches(2), named))


def test_a_disk_that_returns_other_bytes_is_never_trained_on(tmp_path: Path) -> None:
    how = dataclasses.replace(settings(host=BUDGET, disk=tmp_path, chunk=CHUNK), verify_disk=True)
    plain = run_plain(Squares, batches(3))
    plain.assert_same(run_engine(Squares, batches(3), how))
    engine, optimizer = make_engine(Squares, how)
    engine.backward(engine(**batches(1)[0]))
    optimizer.step()
    engine.memory.settle()
    (disk,) = (tier for tier in engine.memory.tiers if isinstance(tier, DiskTier))
    file = os.open(f"/proc/self/fd/{disk.spool._file}", os.O_WRONLY)
    for slot in disk.slots.values():
        os.pwrite(file, b"\xa5", slot.offset + 17)
    os.close(file)

    def train() -> None:
        for batch in batches(2):
            engine.backward(engine(**batch))
            optimizer.step()

    with pytest.raises(SpoolError, match="not the bytes that were written there"):
        train()
    engine.close()
