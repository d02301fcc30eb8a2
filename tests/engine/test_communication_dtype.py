"""`communication_data_type`: what gradients of ranks are rounded to before they are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from tests.rank_pool import RankPool

STEPS, RATE = 4, 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model() -> nn.Module:
    """Two weights of 128 elements, each a chunk, so that nothing is padded."""
    torch.manual_seed(0)
    narrow, wide = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
    return nn.Sequential(narrow, nn.Tanh(), wide)


ELEMENTS = 2 * 128


def loss_of(module: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    out: torch.Tensor = module(torch.randn(4, 8, generator=draw).to(dtype))
    return out.float().square().mean()


def on_ranks(
    rank: int,
    size: int,
    stage: int,
    precision: str,
    kept: str,
    wire: str | None,
    exact: bool = False,
) -> tuple[list[float], int, int]:
    """This rank's losses, and the bytes of gradients of a step: asked for, and handed over."""
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0,
        "communication_data_type": wire,
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 128, "deepspeed_exact": exact},
    }
    if precision != "fp32":
        given[precision] = {"enabled": True}
        given["data_types"] = {"grad_accum_dtype": kept}
    engine, *_ = patrickstar.initialize(model=model(), config=given)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, rank, step, DTYPES[precision])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.communicator is not None
    engine.communicator.drain()
    reduced = engine.communicator.counters.snapshot()["reduce-scatter"]
    engine.close()
    return losses, reduced.payload_bytes // STEPS, reduced.sent_bytes // STEPS


def alone(precision: str, kept: str, wire: str | None) -> list[list[float]]:
    """The losses of each of two ranks, computed by one process."""
    dtype, travels = DTYPES[precision], DTYPES[wire or kept]
    module, masters = model().to(dtype), [p.detach() for p in model().parameters()]
    losses: list[list[float]] = [[], []]
    for step in range(STEPS):
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(2):
            loss = loss_of(module, rank, step, dtype)
            losses[rank].append(loss.item())
            gradients = torch.autograd.grad(loss, list(module.parameters()))
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.to(travels)
        with torch.no_grad():
            for parameter, master, total in zip(module.parameters(), masters, sums, strict=True):
                master.sub_((total / 2).to(DTYPES[kept]).float(), alpha=RATE)
                parameter.copy_(master)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "precision, kept, wire, nbytes",
    [
        ("fp32", "fp32", None, 4),
        ("fp32", "fp32", "bf16", 2),
        ("fp32", "fp32", "fp16", 2),
        ("bf16", "bf16", None, 2),
        ("bf16", "bf16", "fp32", 4),
        ("bf16", "fp32", None, 4),
        ("bf16", "fp32", "bf16", 2),
    ],
)
def test_gradients_travel_in_it_and_the_losses_are_those_of_gradients_rounded_to_it(
    stage: int, precision: str, kept: str, wire: str | None, nbytes: int, ranks: RankPool
) -> None:
    expected = alone(precision, kept, wire)
    answers = ranks.run(on_ranks, 2, stage, precision, kept, wire)
    for (losses, payload, sent), theirs in zip(answers, expected, strict=True):
        assert payload == ELEMENTS * nbytes
        assert sent == payload // 2, "the other rank's half goes over the network"
        assert losses == theirs
    if precision == "fp32" and nbytes == 2:
        assert expected != alone("fp32", "fp32", None), "rounding has to be seen"


def test_deepspeeds_default_is_the_dtype_of_the_parameters_and_reproduced(ranks: RankPool) -> None:
    plain, exact = (ranks.run(on_ranks, 2, 1, "bf16", "fp32", None, how) for how in (False, True))
    assert [(payload, sent) for _, payload, sent in plain] == [(4 * ELEMENTS, 2 * ELEMENTS)] * 2
    assert [(payload, sent) for _, payload, sent in exact] == [(2 * ELEMENTS, ELEMENTS)] * 2
