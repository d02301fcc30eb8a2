"""What a run tells while it trains: progress lines, times, and events for the monitors.

Progress is logged as in DeepSpeed (see `logs`); times are printed, since whoever turned them on
wants to see them. Only the first rank tells. Losses are those of its own micro-batches: nothing
here makes ranks wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from patrickstar.config import Config
from patrickstar.engine.logs import log_dist
from patrickstar.engine.timers import StepTimers
from patrickstar.monitor import CsvFiles, Event, Monitor, TensorBoard, WeightsAndBiases, Writer

_EVENTS = "Train/Samples"


class Telling:
    """Tells of one run, on the rank that tells.

    Args:
        monitor: takes the events.
        steps_per_print: updates between two progress lines; None for none.
        timers: of the parts of a step, if they are wanted.
        clock: seconds.
    """

    def __init__(
        self,
        monitor: Monitor,
        steps_per_print: int | None = None,
        timers: StepTimers | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.monitor, self.timers = monitor, timers
        self._every, self._clock = steps_per_print, clock
        self._losses: list[float] = []
        self._last = (clock(), 0)  # when the last progress line was, and after how many samples

    def timed(self, part: str) -> AbstractContextManager[None]:
        """See `StepTimers.timed`."""
        return nullcontext() if self.timers is None else self.timers.timed(part)

    def loss(self, loss: torch.Tensor) -> None:
        """The loss of a micro-batch, before it is divided or scaled."""
        if self.monitor.enabled:
            self._losses.append(float(loss.detach()))

    def stepped(self, engine: Any, *, updated: bool) -> None:
        """A step is over.

        Args:
            engine: has the counters, rates and the loss scale.
            updated: it was the last one of an accumulation.
        """
        if updated:
            if self.monitor.enabled:
                self.monitor.write_events(self._events(engine))
            self._losses.clear()
            if self._every is not None and engine.global_steps % self._every == 0:
                log_dist(self._progress(engine), ranks=[0])
        if self.timers is not None:
            micro, whole = self.timers.take(updated=updated)
            print(_line(micro), flush=True)
            if whole is not None:
                if self.monitor.enabled:
                    self.monitor.write_events(_times(whole, engine.global_samples))
                print(_line(whole), flush=True)

    def close(self) -> None:
        """Close the monitors."""
        self.monitor.close()

    def _events(self, engine: Any) -> list[Event]:
        samples = engine.global_samples
        events: list[Event] = []
        if self._losses:  # a backward that is not the engine's has told of none
            mean = sum(self._losses) / len(self._losses)
            events.append((f"{_EVENTS}/train_loss", mean, samples))
        events.append((f"{_EVENTS}/lr", engine.get_lr()[0], samples))
        if engine.fp16_enabled():
            events.append((f"{_EVENTS}/loss_scale", engine.loss_scale, samples))
        return events

    def _progress(self, engine: Any) -> str:
        now, samples = self._clock(), engine.global_samples
        (then, before), self._last = self._last, (now, samples)
        rate = (samples - before) / max(now - then, 1e-9)
        return (
            f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
            f"mom={engine.get_mom()}, samples/s={rate:.4g}"
        )


def telling_of(config: Config, device: torch.device, *, first: bool) -> Telling | None:
    """What `config` wants told; None if nothing is.

    Args:
        first: whether this rank is the one that tells.

    Raises:
        ConfigError: a monitor's library is not installed, or a folder cannot be written.
    """
    if not first:
        return None
    monitor = Monitor(_writers(config))
    timers = StepTimers(_synchronizing(device)) if config.wall_clock_breakdown else None
    if not (monitor.enabled or timers or config.steps_per_print):
        return None
    return Telling(monitor, config.steps_per_print, timers)


def _writers(config: Config) -> list[Writer]:
    writers: list[Writer] = []
    try:
        if config.tensorboard.enabled:
            board = config.tensorboard
            writers.append(TensorBoard(Path(board.output_path, board.job_name)))
        if config.wandb.enabled:
            wandb = config.wandb
            writers.append(WeightsAndBiases(wandb.project, wandb.group, wandb.team))
        if config.csv_monitor.enabled:
            files = config.csv_monitor
            writers.append(CsvFiles(Path(files.output_path, files.job_name)))
    except BaseException:
        Monitor(writers).close()
        raise
    return writers


def _synchronizing(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.accelerator.synchronize(device)


def _times(whole: Mapping[str, float], samples: int) -> list[Event]:
    names = {
        "fwd": "forward",
        "bwd": "backward",
        "bwd_inner": "backward_inner",
        "bwd_allreduce": "backward_allreduce",
        "step": "step",
    }
    return [
        (f"{_EVENTS}/elapsed_time_ms_{name}", whole[part], samples) for part, name in names.items()
    ]


def _line(times: Mapping[str, float]) -> str:
    return " | ".join(["time (ms)", *(f"{name}: {spent:.2f}" for name, spent in times.items())])
