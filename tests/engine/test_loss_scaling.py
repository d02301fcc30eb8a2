"""fp16: the dynamic loss scale, overflow, and what a skipped step leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return (self.second(torch.tanh(self.first(x))).float() * factor).square().mean()


def config(tmp_path: Path, **fp16: Any) -> dict[str, Any]:
    return {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, **fp16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.5,
        "patrickstar": {"memory": {"host": 200_000, "disk": str(tmp_path)}, "chunk_size": 32},
    }


def test_a_step_that_overflows_is_skipped_and_the_scale_falls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = patrickstar.initialize_engine(Tiny, config(tmp_path, hysteresis=1))
    x = torch.randn(2, 4)
    scales, changed = [], []
    for factor in (1.0, 1.0, 3e4, 1.0, 1.0, 1.0):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        model.backward(model(x, factor))
        optimizer.step()
        scales.append(model.loss_scale)
        after = model.state_dict()
        changed.append(any(not torch.equal(before[k], after[k]) for k in before))
    assert changed == [True, True, False, True, True, True]
    assert scales == [256.0, 256.0, 128.0, 128.0, 128.0, 256.0]
    assert (model.global_steps, model.skipped_steps) == (6, 1)
    model.close()


def test_fp16_has_the_bits_of_a_loop_that_unscales_and_clips_fp32_gradients(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, optimizer = patrickstar.initialize_engine(Tiny, config(tmp_path, loss_scale=64.0))
    torch.manual_seed(0)
    plain = Tiny()
    masters = [p.detach().clone() for p in plain.parameters()]
    plain.half()
    reference = torch.optim.AdamW(masters, lr=0.01, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(2, 4, generator=generator)
        loss = model(x)
        model.backward(loss)
        optimizer.step()
        expected = plain(x.half())
        (expected.float() * 64.0).backward()
        for master, p in zip(masters, plain.parameters(), strict=True):
            master.grad = p.grad.float() * (1.0 / 64.0)
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 0.5)
        reference.step()
        with torch.no_grad():
            for master, p in zip(masters, plain.parameters(), strict=True):
                p.copy_(master)
        assert loss.item() == expected.item()
    found, wanted = model.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model.close()


def test_a_bf16_step_without_finite_gradients_is_skipped_unless_told_otherwise() -> None:
    for check, skipped in ((True, 1), (False, 0)):
        config = {"bf16": {"enabled": True, "check_grad_overflow": check}}
        model, optimizer = patrickstar.initialize_engine(Tiny, config)
        before = model.state_dict()
        model.backward(model(torch.full((2, 4), float("nan"))))
        optimizer.step()
        assert model.skipped_steps == skipped
        kept = all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
        assert kept is bool(skipped)
        assert model.was_step_applied() is not bool(skipped)
        model.close()


@pytest.mark.parametrize("stage, skipped", [(2, 1), (3, 0)])
def test_what_is_no_number_goes_into_adam_at_stage_3_where_deepspeed_is_reproduced(
    stage: int, skipped: int
) -> None:
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"deepspeed_exact": True},
    }
    model, optimizer = patrickstar.initialize_engine(Tiny, config)
    model.backward(model(torch.full((2, 4), float("nan"))))
    optimizer.step()
    assert model.skipped_steps == skipped
    model.close()


def test_buffers_keep_their_dtype_except_where_a_kernel_wants_one() -> None:
    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0) / 3)
            self.norm = nn.BatchNorm1d(4)
            self.out = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(x) * self.table.to(x.dtype)).float().mean()

    model, optimizer = patrickstar.initialize_engine(Buffered, {"bf16": {"enabled": True}})
    model.backward(model(torch.randn(3, 4)))
    optimizer.step()
    assert model.table.dtype is torch.float32
    assert model.norm.running_mean.dtype is torch.bfloat16
    model.close()


def test_an_infinite_gradient_without_a_loss_scale_is_trained_on_as_torch_does() -> None:
    model, optimizer = patrickstar.initialize_engine(Tiny, {"gradient_clipping": 0.0})
    model.backward(model(torch.full((2, 4), float("nan"))))
    optimizer.step()
    assert model.get_global_grad_norm() != model.get_global_grad_norm()  # not a number
    assert model.skipped_steps == 0
    model.close()


@pytest.mark.parametrize("given", [{}, {"model_provider": Tiny, "model_func": Tiny}])
def test_one_provider_must_be_given(given: dict[str, Any]) -> None:
    with pytest.raises(patrickstar.ConfigError, match="model_provider"):
        patrickstar.initialize_engine(**given)


def test_the_names_of_the_original_are_accepted() -> None:
    model, _ = patrickstar.initialize_engine(model_func=Tiny, local_rank=0, config={})
    assert isinstance(model(torch.zeros(1, 4)), torch.Tensor)
    model.close()
