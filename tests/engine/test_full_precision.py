"""Masters, gradients and optimizer states of one parameter, read and written in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import utils
from patrickstar.errors import ConfigError
from tests.rank_pool import RankPool


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def start(tmp_path: Path | None = None, **config: Any) -> tuple[Any, nn.Module]:
    module = network()
    given: dict[str, Any] = {
        "train_batch_size": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **config,
    }
    if tmp_path is not None:
        memory = {"host": "64KiB", "disk": str(tmp_path)}
        given["patrickstar"] = {"memory": memory, "chunk_size": 64}
    engine, *_ = patrickstar.initialize(model=module, config=given)
    return engine, module


def backward(engine: Any, seed: int = 1) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(x).float().square().mean())


@pytest.mark.parametrize("budget", [False, True])
def test_the_fp32_value_is_the_master_and_not_the_rounded_weight(
    budget: bool, tmp_path: Path
) -> None:
    engine, module = start(tmp_path if budget else None)
    value = utils.safe_get_full_fp32_param(module[0].weight)
    assert value is not None and value.dtype is torch.float32
    assert torch.equal(value, network()[0].weight)
    assert torch.equal(value.bfloat16(), module[0].weight.detach())
    engine.close()


@pytest.mark.parametrize("budget", [False, True])
def test_a_value_that_is_set_goes_into_weight_and_master_and_training_goes_on_from_it(
    budget: bool, tmp_path: Path
) -> None:
    engine, module = start(tmp_path if budget else None, gradient_clipping=0)
    weight, value = module[0].weight, torch.full((16, 8), 0.123456789)
    utils.safe_set_full_fp32_param(weight, value)
    assert torch.equal(weight.detach(), value.bfloat16())
    backward(engine)
    gradient = utils.safe_get_full_grad(weight)
    assert gradient is not None
    engine.step()
    moved = utils.safe_get_full_fp32_param(weight)
    expected = value - 1e-2 * gradient / (gradient.abs() + 1e-8)
    assert moved is not None
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-7)
    engine.close()


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step))


def square() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers)


def another(step: int) -> torch.Tensor:
    return 0.1 * torch.randn(64, 64, generator=torch.Generator().manual_seed(100 + step))


def plainly(low: torch.dtype, when: str) -> tuple[list[float], list[torch.Tensor]]:
    """An ordinary loop with masters that gives a weight another value twice."""
    module = square()
    masters = [p.detach().clone() for p in module.parameters()]
    module.to(low)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0, fused=True)
    losses = []

    def change(step: int, now: str) -> None:
        if when == now and step in (2, 4):
            with torch.no_grad():
                masters[2].copy_(another(step))
                module[2].weight.copy_(another(step))

    for step in range(6):
        change(step, "between steps")
        loss = module(rows(step).to(low)).float().square().mean()
        loss.backward()
        change(step, "before the step")
        for parameter, master in zip(module.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(module.parameters(), masters, strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses, masters


@pytest.mark.parametrize("when", ["between steps", "before the step"])
@pytest.mark.parametrize("tiers", ["memory", "host and disk", "device, host and disk"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_value_set_in_16_bits_is_what_the_next_forward_sees_and_the_next_update_starts_from(
    precision: str, tiers: str, when: str, tmp_path: Path
) -> None:
    """Also while the update of the step before waits for the next forward."""
    memory: dict[str, Any] = {} if tiers == "memory" else {"host": "300KiB", "disk": str(tmp_path)}
    if tiers.startswith("device"):
        memory |= {"device": "100KiB"}
    module = square()
    given = {
        "train_batch_size": 4,
        precision: {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "patrickstar": {"memory": memory, "chunk_size": 4160},  # a layer
    }
    if precision == "fp16":
        given["fp16"] |= {"loss_scale": 1.0}
    engine, *_ = patrickstar.initialize(model=module, config=given)
    losses, waited = [], []
    for step in range(6):
        if when == "between steps" and step in (2, 4):
            waited.append(engine.memory.has_due())
            utils.safe_set_full_fp32_param(module[2].weight, another(step))
        loss = engine(rows(step)).float().square().mean()
        engine.backward(loss)
        if when == "before the step" and step in (2, 4):
            utils.safe_set_full_fp32_param(module[2].weight, another(step))
        engine.step()
        losses.append(loss.item())
    masters = [utils.safe_get_full_fp32_param(p) for p in module.parameters()]
    expected, others = plainly(torch.bfloat16 if precision == "bf16" else torch.half, when)
    assert losses == expected
    for ours, plain in zip(masters, others, strict=True):
        assert ours is not None and torch.equal(ours, plain)
    if when == "between steps":
        assert any(waited) == (tiers != "memory")
    engine.close()


def set_on_ranks(rank: int, size: int, stage: int) -> list[Any]:
    """The weight that is there, and its fp32 value, after it was set and after one more step."""
    module = square()
    given = {
        "train_batch_size": 4 * size,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 4160},
    }
    engine, *_ = patrickstar.initialize(model=module, config=given)
    found = []
    for step in range(3):
        engine.backward(engine(rows(step + rank)).float().square().mean())
        engine.step()
        if step:
            utils.safe_set_full_fp32_param(module[2].weight, another(step))
            found.append((step, module[2].weight.detach().clone()))
        found.append((step, utils.safe_get_full_fp32_param(module[2].weight)))
    engine.close()
    return found[1:]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_value_is_set_on_every_rank(stage: int, ranks: RankPool) -> None:
    for found in ranks.run(set_on_ranks, 2, stage):
        for step, value in found:
            expected = another(step)
            assert torch.equal(value, expected.to(value.dtype))


def test_a_weight_changed_by_hand_shows_in_its_fp32_value() -> None:
    engine, module = start()
    with torch.no_grad():
        module[0].weight[0].fill_(2.0)
    value = utils.safe_get_full_fp32_param(module[0].weight)
    assert value is not None
    assert value[0].tolist() == [2.0] * 8
    assert torch.equal(value[1:], network()[0].weight[1:])
    engine.close()


def test_states_are_zero_before_the_first_step_and_the_optimizers_afterwards() -> None:
    engine, module = start(gradient_clipping=0)
    state = utils.safe_get_full_optimizer_state(module[0].weight, "exp_avg")
    assert state is not None and not state.any()
    backward(engine)
    gradient = utils.safe_get_full_grad(module[0].weight)
    engine.step()
    state = utils.safe_get_full_optimizer_state(module[0].weight, "exp_avg")
    assert state is not None and gradient is not None
    torch.testing.assert_close(state, 0.1 * gradient)
    engine.close()


@pytest.mark.parametrize("before", [True, False])
def test_a_state_that_is_set_is_what_the_next_update_uses(before: bool) -> None:
    engine, module = start()
    if not before:
        backward(engine)
        engine.step()
    weight = module[0].weight
    utils.safe_set_full_optimizer_state(weight, torch.full((16, 8), 1e12), "exp_avg_sq")
    value = utils.safe_get_full_fp32_param(weight)
    other = utils.safe_get_full_fp32_param(module[2].weight)
    backward(engine)
    engine.step()
    after = utils.safe_get_full_fp32_param(weight)
    assert value is not None and after is not None
    torch.testing.assert_close(value, after, rtol=0, atol=1e-7)  # divided by a million
    moved = utils.safe_get_full_fp32_param(module[2].weight)
    assert other is not None and moved is not None
    assert (other - moved).abs().max() > 1e-3
    engine.close()


def test_a_gradient_that_is_set_is_clipped_and_stepped() -> None:
    engine, module = start(gradient_clipping=1.0)
    backward(engine)
    for parameter in module.parameters():
        utils.safe_set_full_grad(parameter, torch.zeros(parameter.shape))
    utils.safe_set_full_grad(module[2].bias, torch.tensor([3.0, 0.0, 4.0, 0.0]))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(5.0)
    state = utils.safe_get_full_optimizer_state(module[2].bias, "exp_avg")
    assert state is not None
    assert state.tolist() == pytest.approx([0.06, 0.0, 0.08, 0.0], rel=1e-5)
    engine.close()


def test_gradients_are_replaced_by_what_a_function_makes_of_them() -> None:
    engine, module = start()
    backward(engine)
    before = [utils.safe_get_full_grad(p) for p in module.parameters()]
    utils.safe_update_full_grad_vectorized(list(module.parameters()), lambda grad, _: grad * 2)
    for parameter, gradient in zip(module.parameters(), before, strict=True):
        assert gradient is not None
        assert torch.equal(utils.safe_get_full_grad(parameter), gradient * 2)
    engine.close()


def test_a_parameter_in_pieces_is_one_tensor() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(16, 64))
    expected = wide[0].weight.detach().clone()
    config = {"bf16": {"enabled": True}, "patrickstar": {"piece_size": 256}}
    engine, *_ = patrickstar.initialize(model=wide, config=config)
    weight = wide[0].weight
    value = utils.safe_get_full_fp32_param(weight)
    assert value is not None and torch.equal(value, expected)
    utils.safe_set_full_fp32_param(weight, expected * 3)
    again = utils.safe_get_full_fp32_param(weight)
    assert again is not None and torch.equal(again, expected * 3)
    engine.close()


def test_what_belongs_to_no_run_or_is_frozen_has_no_value() -> None:
    module = network()
    assert utils.safe_get_full_fp32_param(module[0].weight) is None
    module[0].weight.requires_grad_(False)
    engine, *_ = patrickstar.initialize(model=module, config={"bf16": {"enabled": True}})
    assert utils.safe_get_full_fp32_param(module[0].weight) is None
    with pytest.raises(ConfigError, match=r"'0\.weight' is frozen"):
        utils.safe_set_full_fp32_param(module[0].weight, torch.zeros(16, 8))
    with pytest.raises(ConfigError, match="belongs to no run"):
        utils.safe_set_full_fp32_param(network()[0].weight, torch.zeros(16, 8))
    engine.close()


def test_a_wrong_shape_or_state_is_named() -> None:
    engine, module = start()
    with pytest.raises(ConfigError, match=r"\(16, 8\).*\(8, 16\)"):
        utils.safe_set_full_fp32_param(module[0].weight, torch.zeros(8, 16))
    with pytest.raises(ConfigError, match=r"no state 'momentum'.*exp_avg"):
        utils.safe_get_full_optimizer_state(module[0].weight, "momentum")
    engine.close()


def test_the_local_share_of_one_rank_is_everything_flat() -> None:
    engine, module = start()
    backward(engine)
    weight = module[0].weight
    local, full = utils.safe_get_local_fp32_param(weight), utils.safe_get_full_fp32_param(weight)
    assert local is not None and full is not None
    assert torch.equal(local, full.flatten())
    utils.safe_set_local_fp32_param(weight, torch.ones(128))
    assert (weight == 1).all()
    gradient = utils.safe_get_local_grad(weight)
    assert gradient is not None and gradient.shape == (128,)
    engine.close()


def test_an_engine_that_is_gone_is_not_kept_by_its_parameters() -> None:
    import gc
    import weakref

    engine, module = start()
    gone = weakref.ref(engine)
    engine.close()
    del engine
    gc.collect()
    assert gone() is None
    assert utils.safe_get_full_fp32_param(module[0].weight) is None
