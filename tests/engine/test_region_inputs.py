"""Inputs of checkpointed regions in chunks on lower tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.errors import BudgetError
from tests.engine.training import run_engine, run_plain, settings
from tests.rank_pool import RankPool

KIB, KIND = 1 << 10, "activation"
ROWS, WIDTH, LAYERS = 512, 32, 12
INPUT = ROWS * WIDTH * 4  # bytes that a region keeps


class Deep(nn.Module):
    """Regions that each keep an input of 64 KiB; they share a second one."""

    def __init__(self, reentrant: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, other = x * 1.0, x + 1.0
        hidden.requires_grad_()
        for layer in self.layers:

            def region(
                h: torch.Tensor, o: torch.Tensor | None, layer: nn.Module = layer
            ) -> torch.Tensor:
                found = torch.tanh(layer(h)).sin()
                return found if o is None else found * o

            second = other if self.shared else None
            hidden = checkpoint(region, hidden, second, use_reentrant=self.reentrant)
        return hidden.square().mean()


def batches(count: int = 4) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(ROWS, WIDTH, generator=draw)} for _ in range(count)]


def carried(**how: Any) -> RunSettings:
    return replace(settings(chunk=1056, **how), carry_inputs=True)


TIERS: dict[str, dict[str, Any]] = {
    "device and host": {"device": 600 * KIB, "host": 2048 * KIB},
    "device, host and disk": {"device": 600 * KIB, "host": 600 * KIB, "disk": True},
    "host and disk": {"host": 900 * KIB, "disk": True},
    "an accelerator": {"device": 600 * KIB, "host": 2048 * KIB, "accelerator": True},
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tiers", TIERS)
def test_a_budget_without_room_for_the_inputs_trains_to_the_same_bits(
    tiers: str, reentrant: bool, tmp_path: Path
) -> None:
    how = dict(TIERS[tiers])
    if how.pop("disk", False):
        how["disk"] = tmp_path
    with pytest.raises(BudgetError):
        run_engine(lambda: Deep(reentrant), batches(2), settings(chunk=1056, **how))
    expected = run_plain(lambda: Deep(reentrant), batches())
    run_engine(lambda: Deep(reentrant), batches(), carried(**how)).assert_same(expected)


@pytest.mark.parametrize(
    ("memory", "disk"),
    [
        # What the host alone uses cannot go to the device, however much room is left there.
        ({"host": 684_032, "device": 567_296, "clipping": 1.0}, 131_072),
        ({"host": 859_136, "clipping": 1.0}, 184_320),
        ({"host": 253_952, "device": 820_224, "clipping": 1.0}, 562_176),
    ],
)
def test_a_disk_too_small_for_the_inputs_is_refused_with_one_that_works(
    memory: dict[str, Any], disk: int, tmp_path: Path
) -> None:
    steps: list[None] = []

    def run(nbytes: int) -> None:
        how = replace(carried(**memory), disk=(tmp_path, nbytes))
        run_engine(
            lambda: Deep(True),
            batches(3),
            how,
            keep_gradients=False,
            look=lambda *_: steps.append(None),
        )

    with pytest.raises(BudgetError) as refused:
        run(disk)
    assert not steps
    run(refused.value.smallest)


def test_every_iteration_uses_the_same_chunks_and_leaves_nothing_behind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, optimizer = make_engine(Deep, carried(**TIERS["device and host"]))
    kept = []
    for batch in batches(5):
        loss = engine(**batch)
        kept.append({c for c in engine.memory._chunks if engine.memory.chunk(c).kind == KIND})
        engine.backward(loss)
        for chunk in kept[-1]:
            assert engine.memory.ledger.is_blank(chunk)
        optimizer.step()
        optimizer.zero_grad()
    assert len(kept[0]) == LAYERS and all(chunks == kept[0] for chunks in kept)
    engine.close()


def test_an_input_of_several_regions_is_kept_once() -> None:
    torch.manual_seed(0)
    engine, _ = make_engine(lambda: Deep(shared=True), carried(device=1 << 20, host=2048 * KIB))
    loss = engine(**batches(1)[0])
    chunks = [c for c in engine.memory._chunks if engine.memory.chunk(c).kind == KIND]
    assert len(chunks) == LAYERS + 1
    engine.backward(loss)
    engine.close()


def test_a_graph_that_is_dropped_gives_its_chunks_back() -> None:
    torch.manual_seed(0)
    engine, optimizer = make_engine(Deep, carried(**TIERS["device and host"]))
    for batch in batches(3):
        loss = engine(**batch)
        del loss
    loss = engine(**batches(1)[0])
    engine.backward(loss)
    optimizer.step()
    chunks = [c for c in engine.memory._chunks if engine.memory.chunk(c).kind == KIND]
    assert len(chunks) <= 2 * LAYERS
    engine.close()


def test_a_graph_can_be_gone_through_twice() -> None:
    def gradients(how: RunSettings) -> list[torch.Tensor]:
        torch.manual_seed(0)
        engine, _ = make_engine(Deep, how)
        loss = engine(**batches(1)[0])
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        found = [p.grad.clone() for p in engine.parameters() if p.grad is not None]
        engine.close()
        return found

    expected = gradients(settings(chunk=1056))
    found = gradients(carried(**TIERS["device and host"]))
    assert len(found) == len(expected) == 2 * LAYERS
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def on_a_rank(rank: int, size: int, carry: bool) -> tuple[list[float], int]:
    """As DeepSpeed's scripts ask for it; the losses, and the bytes that left the device."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(patrickstar.checkpointing.checkpoint(layer, x))
            return x.square().mean()

    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {"cpu_checkpointing": carry},
        "patrickstar": {"memory": {"device": "2MiB", "host": "8MiB"}, "chunk_size": 1056},
    }
    engine, *_ = patrickstar.initialize(model=Model(), config=config)
    losses = []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        loss = engine(torch.randn(ROWS, WIDTH, generator=draw))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = engine.memory_report().moved.get("host->device", 0)
    engine.close()
    return losses, moved


def test_the_key_of_deepspeed_does_it_on_several_ranks(ranks: RankPool) -> None:
    plain, carrying = ranks.run(on_a_rank, 2, False), ranks.run(on_a_rank, 2, True)
    for (expected, _), (losses, moved) in zip(plain, carrying, strict=True):
        assert losses == expected
        assert moved >= 3 * (LAYERS - 1) * INPUT
