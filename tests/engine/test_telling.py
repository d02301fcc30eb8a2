"""What a run tells: progress lines, times of the parts of a step, events."""

from __future__ import annotations

import csv
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.engine.engine import Engine
from patrickstar.engine.timers import StepTimers
from patrickstar.errors import ConfigError


def engine_for(**config: Any) -> Engine:
    torch.manual_seed(0)
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine, *_ = patrickstar.initialize(model=nn.Linear(4, 1), config=base | config)
    return engine


def train(engine: Engine, micro_batches: int) -> list[float]:
    losses = []
    for number in range(micro_batches):
        loss = engine(torch.full((2, 4), 1.0 + number)).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def rows(folder: Path, name: str) -> list[tuple[int, float]]:
    with (folder / f"Train_Samples_{name}.csv").open() as file:
        return [(int(step), float(value)) for step, value in list(csv.reader(file))[1:]]


def test_events_of_an_update_are_those_of_all_its_micro_batches(tmp_path: Path) -> None:
    engine = engine_for(
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    )
    losses = train(engine, 5)  # the fifth begins another update
    engine.close()
    means = [sum(losses[:2]) / 2, sum(losses[2:4]) / 2]
    assert rows(tmp_path / "run", "train_loss") == list(zip((4, 8), means, strict=True))
    assert rows(tmp_path / "run", "lr") == [(4, 0.0), (8, 0.005)]
    assert not (tmp_path / "run" / "Train_Samples_loss_scale.csv").exists()


def test_the_loss_scale_of_fp16_is_an_event_of_skipped_steps_too(tmp_path: Path) -> None:
    engine = engine_for(
        fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    )
    train(engine, 1)
    engine.backward(engine(torch.full((2, 4), 6e4)).float().square().sum())  # overflows
    engine.step()
    assert engine.skipped_steps == 1
    engine.close()
    assert rows(tmp_path / "run", "loss_scale") == [(1, 16.0), (2, 8.0)]


def test_the_script_may_write_events_of_its_own(tmp_path: Path) -> None:
    silent = engine_for()
    assert not silent.monitor.enabled
    silent.monitor.write_events([("Train/Samples/accuracy", 0.5, 1)])
    silent.close()
    engine = engine_for(csv_monitor={"enabled": True, "output_path": str(tmp_path)})
    engine.monitor.write_events([("Train/Samples/accuracy", 0.5, 1)])
    engine.close()
    assert rows(tmp_path / "DeepSpeedJobName", "accuracy") == [(1, 0.5)]


def test_a_monitor_that_cannot_begin_is_an_error_before_the_model_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    built = []
    with pytest.raises(ConfigError, match="csv_monitor"):
        patrickstar.initialize_engine(
            lambda: built.append(1) or nn.Linear(1, 1),
            {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "file")}},
        )
    assert not built


def test_progress_is_logged_every_so_many_updates(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(steps_per_print=2, train_micro_batch_size_per_gpu=2)
    with caplog.at_level(logging.INFO, "patrickstar"):
        train(engine, 5)
    engine.close()
    lines = [line for line in caplog.messages if "step=" in line]
    assert len(lines) == 2
    assert "[Rank 0] step=2, skipped=0, lr=[0.01], mom=[(0.9, 0.999)], samples/s=" in lines[0]
    assert "step=4," in lines[1]


def test_times_are_printed_of_micro_batches_and_updates_and_are_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_for(
        wall_clock_breakdown=True,
        gradient_accumulation_steps=2,
        csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
    )
    assert engine.get_wall_clock_timers() == {}
    train(engine, 2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "time (ms)" in line]
    names = [[part.partition(":")[0] for part in line.split(" | ")[1:]] for line in lines]
    parts = ["fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"]
    micro = [f"{part}_microstep" for part in parts]
    assert names == [micro, micro, parts]
    latest = engine.get_wall_clock_timers()
    assert list(latest) == micro + parts and all(spent >= 0 for spent in latest.values())
    assert latest["bwd"] == pytest.approx(latest["bwd_inner"] + latest["bwd_allreduce"])
    for name in ("forward", "backward", "backward_inner", "backward_allreduce", "step"):
        ((samples, spent),) = rows(tmp_path / "run", f"elapsed_time_ms_{name}")
        assert samples == 2 and spent >= 0
    engine.close()


def test_timers_wait_for_the_device_at_both_ends_and_add_up() -> None:
    waits = []
    timers = StepTimers(lambda: waits.append(1), clock=map(float, itertools.count()).__next__)
    for _ in range(2):
        with timers.timed("fwd"):
            pass
    assert len(waits) == 4
    micro, whole = timers.take(updated=False)
    assert micro["fwd_microstep"] == 2000.0 and whole is None
    with timers.timed("fwd"):
        pass
    micro, whole = timers.take(updated=True)
    assert micro["fwd_microstep"] == 1000.0 and whole is not None and whole["fwd"] == 3000.0
    _, whole = timers.take(updated=True)
    assert whole is not None and whole["fwd"] == 0.0
