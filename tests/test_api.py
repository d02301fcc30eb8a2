"""`import patrickstar as deepspeed`: an ordinary DeepSpeed script runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import patrickstar as deepspeed

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def data(count: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, generator=generator), torch.randn(1, generator=generator))
        for _ in range(count)
    ]


def train(engine: Any, loader: Any) -> list[float]:
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_script_with_everything_from_the_config() -> None:
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=network(), training_data=data(), config=CONFIG
    )
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert len(loader) == 8
    before = engine.state_dict()
    train(engine, loader)
    assert not torch.equal(engine.state_dict()["0.weight"], before["0.weight"])
    assert (engine.global_steps, engine.micro_steps) == (4, 8)
    assert engine.global_samples == 32
    assert scheduler.get_last_lr() == engine.get_lr()
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.close()


@pytest.mark.parametrize("chained", [False, True], ids=["sequential", "chained"])
def test_schedulers_inside_a_scheduler_are_taken_over_too(chained: bool) -> None:
    rates = torch.optim.lr_scheduler

    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        both = [rates.LinearLR(optimizer, 0.25, total_iters=2), rates.ExponentialLR(optimizer, 0.5)]
        if chained:
            return rates.ChainedScheduler(both, optimizer)
        return rates.SequentialLR(optimizer, both, [2])

    module = network()
    client = torch.optim.SGD(module.parameters(), lr=0.5)
    plain = schedule(torch.optim.SGD(network().parameters(), lr=0.5))
    engine, _, _, _ = deepspeed.initialize(
        model=module,
        optimizer=client,
        lr_scheduler=schedule(client),
        config={"train_micro_batch_size_per_gpu": 4},
    )
    rates_seen = []
    for _ in range(6):
        rates_seen.append(engine.get_lr()[0])
        assert engine.get_lr() == plain.get_last_lr()
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        plain.optimizer.step()
        plain.step()
    assert len(set(rates_seen)) > 3
    engine.close()


def test_a_client_optimizer_and_scheduler_are_taken_over_with_their_numbers() -> None:
    module, plain = network(), network()
    config = {k: v for k, v in CONFIG.items() if k not in ("optimizer", "scheduler")}
    client = torch.optim.AdamW(
        [
            {"params": [p for p in module.parameters() if p.dim() > 1]},
            {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
    )
    schedule = torch.optim.lr_scheduler.StepLR(client, 1, gamma=0.5)
    engine, _, loader, returned = deepspeed.initialize(
        model=module, optimizer=client, lr_scheduler=schedule, training_data=data(), config=config
    )
    assert returned is schedule
    losses = train(engine, loader)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.dim() > 1]},
            {"params": [p for p in plain.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.02,
        fused=True,
    )
    step_down = torch.optim.lr_scheduler.StepLR(reference, 1, gamma=0.5)
    expected = []
    for index, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(plain(x), y)
        (loss / 2).backward()
        expected.append(loss.item())
        if index % 2:
            nn.utils.clip_grad_norm_(
                [p for group in reference.param_groups for p in group["params"]], 1.0
            )
            reference.step()
            reference.zero_grad()
            step_down.step()
    assert losses == pytest.approx(expected, rel=1e-6)
    assert engine.get_lr() == [0.02 / 16, 0.02 / 16]
    engine.close()


def test_callables_make_the_optimizer_and_the_scheduler() -> None:
    config = {"train_batch_size": 4}
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=network(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.ConstantLR(made, factor=0.5),
        config=config,
    )
    assert scheduler.optimizer is optimizer
    assert engine.get_lr() == [0.05]
    assert optimizer.param_groups[0]["momentum"] == 0.9
    engine.close()


def test_the_accumulation_boundary_is_the_same_before_and_after_the_backward() -> None:
    engine, *_ = deepspeed.initialize(model=network(), config=CONFIG)
    seen = []
    for _ in range(4):
        before = engine.is_gradient_accumulation_boundary()
        engine.backward(engine(torch.ones(4, 8)).mean())
        seen.append((before, engine.is_gradient_accumulation_boundary()))
        engine.step()
    assert seen == [(False, False), (True, True)] * 2
    assert engine.global_steps == 2
    engine.close()


def test_the_boundary_can_be_set_by_hand() -> None:
    engine, *_ = deepspeed.initialize(model=network(), config=CONFIG)
    for boundary in (False, False, True):
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(engine(torch.ones(4, 8)).mean())
        engine.step()
    assert engine.global_steps == 1
    engine.close()


def test_only_the_parameters_given_are_trained() -> None:
    module = network()
    engine, optimizer, *_ = deepspeed.initialize(
        model=module, model_parameters=module[2].parameters(), config={"train_batch_size": 4}
    )
    before = engine.state_dict()
    engine.backward(engine(torch.ones(4, 8)).mean())
    optimizer.step()
    after = engine.state_dict()
    assert torch.equal(before["0.weight"], after["0.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    engine.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [({"config": CONFIG}, "model="), ({"model": nn.Linear(2, 2)}, "config=")],
)
def test_what_is_missing_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(deepspeed.ConfigError, match=message):
        deepspeed.initialize(**given)


def test_an_optimizer_of_another_model_or_with_states_is_refused() -> None:
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(deepspeed.ConfigError, match="not in the model"):
        deepspeed.initialize(model=network(), optimizer=other, config={"train_batch_size": 4})
    module = network()
    used = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 8)).sum().backward()
    used.step()
    with pytest.raises(deepspeed.ConfigError, match="stepped before"):
        deepspeed.initialize(model=module, optimizer=used, config={"train_batch_size": 4})
