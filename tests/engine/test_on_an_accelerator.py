"""Training on a real accelerator: the same bits on every budget, and those of a plain loop."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import patrickstar
from patrickstar.models import GPT, preset

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="needs an accelerator; this machine has none"
)

STEPS = 5
BUDGETS = [
    {},
    {"device": "16MiB"},
    {"device": "8MiB", "host": "24MiB"},
]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (2, 64), generator=generator) for _ in range(STEPS)]


def losses_under(memory: dict[str, str], disk: Path, precision: str) -> list[float]:
    torch.manual_seed(0)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "patrickstar": {"memory": {**memory, "disk": str(disk)}},
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, optimizer = patrickstar.initialize_engine(lambda: GPT(preset("gpt-tiny")), config)
    losses = []
    for tokens in batches():
        tokens = tokens.to(engine.device)
        loss = engine(tokens, tokens)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    report = engine.memory_report()
    for usage in report.tiers.values():
        assert usage.budget is None or usage.peak <= usage.budget
    engine.close()
    del engine, optimizer, loss
    gc.collect()  # the model is an ordinary one again, and takes memory of the device
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_budget_has_the_same_losses(precision: str, tmp_path: Path) -> None:
    first, *others = [losses_under(memory, tmp_path, precision) for memory in BUDGETS]
    for losses in others:
        assert losses == first


def test_a_plain_loop_on_the_device_has_these_losses_but_for_its_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator()
    model = GPT(preset("gpt-tiny")).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected = []
    for tokens in batches():
        tokens = tokens.to(device)
        loss = model(tokens, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    del model, optimizer, loss
    gc.collect()
    got = losses_under(BUDGETS[1], tmp_path, "fp32")
    assert got[0] == expected[0]  # no update yet: the same kernels, the same bits
    assert got == pytest.approx(expected, rel=1e-4)


def test_a_batch_on_the_wrong_device_is_an_error(tmp_path: Path) -> None:
    engine, _ = patrickstar.initialize_engine(lambda: GPT(preset("gpt-tiny")), {})
    tokens = batches()[0]
    with pytest.raises(RuntimeError, match="device"):
        engine(tokens, tokens)
    engine.close()
