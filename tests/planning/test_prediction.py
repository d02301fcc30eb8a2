"""What a step takes beside operators, and what a tier holds at most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

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


def rehearsed(settings: RunSettings) -> Rehearsed:
    tokens = torch.zeros(1, 32, dtype=torch.long, device="meta")
    shape = replace(preset("gpt-tiny"), layers=2)
    return rehearse_run(lambda: GPT(shape), ((tokens, tokens), {}), settings)


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


def test_the_engine_takes_some_microseconds_a_moment() -> None:
    found = measure_overhead()
    assert 1e-6 < found.moment < 1e-2
    assert found.fresh_byte > 0
