"""What a step takes beside operators, and what a tier holds at most."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.config import load_config
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import RunSettings
from patrickstar.machine import Disk, Machine, Processor
from patrickstar.models import GPT, preset
from patrickstar.planning import Prediction, Rehearsed, predict, rehearse_run
from patrickstar.planning.overhead import Overhead, measure_overhead

MACHINE = Machine(
    name="m",
    source="a test",
    processor=Processor(name="p", flops={"float32": 1e10}, copy_bytes_per_s=1e15),
    disk=Disk(read=1e15, write=1e15),
)


def settings_for(accumulation: int = 1) -> RunSettings:
    config = {
        "gradient_accumulation_steps": accumulation,
        "patrickstar": {"memory": {"host": "6MiB", "disk": "not touched"}},
    }
    return settings_from(load_config(config))


def rehearsed(settings: RunSettings, tokens: int = 32) -> Rehearsed:
    batch = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    shape = replace(preset("gpt-tiny"), layers=2)
    return rehearse_run(lambda: GPT(shape), ((batch, batch), {}), settings)


@pytest.fixture(scope="module")
def run() -> Rehearsed:
    return rehearsed(settings_for())


def predicted(run: Rehearsed, **overhead: float) -> Prediction:
    return predict(run, settings_for(), MACHINE, lambda _: 0.0, overhead=Overhead(**overhead))


def seconds(found: Prediction) -> float:
    assert found.step is not None
    return found.step.total


def test_every_moment_and_every_chunk_that_moves_takes_its_time(run: Rehearsed) -> None:
    free = seconds(predicted(run))
    moments = seconds(predicted(run, moment=1.0)) - free
    assert moments == pytest.approx(run.work_moments - 1)
    found = predicted(run, moved_byte=1.0)
    assert sum(found.moved.values()) > 0
    assert seconds(found) - free == pytest.approx(sum(found.moved.values()), rel=1e-6)


def test_a_step_has_all_the_backwards_of_an_accumulation(run: Rehearsed) -> None:
    once, thrice = seconds(predicted(run, moment=1.0)), rehearsed(settings_for(3))
    assert seconds(predicted(thrice, moment=1.0)) == pytest.approx(3 * once, rel=0.01)


def test_the_disk_holds_what_was_saved_and_is_still_good(run: Rehearsed) -> None:
    assert 0 < predicted(run).tiers["disk"].peak < run.state_bytes
    roomy = replace(settings_for(), host_budget=1 << 30)
    assert predict(run.under(roomy), roomy, None, None).tiers["disk"].peak == 0


def test_the_peak_begins_with_building_and_the_disks_file_is_taken_whole() -> None:
    memory = {"device": "64MiB", "host": "6MiB", "disk": {"path": "not touched"}}
    config = {"bf16": {"enabled": True}, "patrickstar": {"memory": memory}}
    settings = settings_from(load_config(config))
    run = rehearsed(settings, tokens=4)
    found = predict(run, settings, None, None).tiers
    # In fp32 first: a part of the weights has two bytes more than it has later.
    assert found["device"].peak == run.needs.built_in(run.budgets)[0] > run.everything(0)
    assert found["disk"].reserved == sum(run.sizes.values()) > found["disk"].peak
    small = replace(settings, disk=("not touched", 4 << 20))
    assert predict(run, small, None, None).tiers["disk"].reserved == 4 << 20


def test_the_engine_takes_some_microseconds_a_moment() -> None:
    found = measure_overhead()
    assert 1e-6 < found.moment < 1e-2
    assert found.fresh_byte > 0


class Wide(nn.Module):
    """A table and a head in pieces, and a recurrent cell that needs its weights whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(4096, 32), nn.GRUCell(32, 32)
        self.head = nn.Linear(32, 4096)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.table(tokens))).float().square().mean()


def test_parameters_in_pieces_are_planned_as_they_run(tmp_path: Path) -> None:
    memory = {"host": "1MiB", "disk": {"path": str(tmp_path)}}
    ours = {"memory": memory, "piece_size": 8192, "chunk_size": 8192}
    tokens = torch.arange(0, 4096, 512)

    def asked() -> Prediction:
        settings = settings_from(load_config({"patrickstar": ours}))
        inputs = ((torch.empty_like(tokens, device="meta"),), {})
        return predict(rehearse_run(Wide, inputs, settings), settings, None, None)

    needed = asked().tiers["host"].smallest
    weights = sum(p.nbytes for p in Wide().parameters())
    assert needed < 2 * weights  # of which four take part in an update: pieces come one by one
    memory["host"] = needed
    assert asked().fits
    engine, optimizer = patrickstar.initialize_engine(Wide, {"patrickstar": ours})
    for _ in range(2):
        engine.backward(engine(tokens))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.memory_report().tiers["host"].peak <= needed
    engine.close()
