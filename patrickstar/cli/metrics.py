"""The metrics file (a JSON object a line), events, and the totals that the summary shows."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from pathlib import Path
from types import TracebackType

from patrickstar.cli.loop import MemoryReport, StepMetrics
from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.monitor import Event

_LAST = 10


class MetricsFile:
    """Writes every step to `path` as it comes, replacing what was there; None writes nothing.

    Nothing is buffered, so that a run that is killed leaves the lines of all its steps.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the metrics file {str(path)!r} cannot be written ({error.strerror}); "
                "choose another place with --metrics FILE"
            ) from error

    def write(self, metrics: StepMetrics) -> None:
        """Append a line.

        Raises:
            PatrickStarError: the system does not take it; the lines before are in the file.
        """
        if self._file is None:
            return
        line = json.dumps(dataclasses.asdict(metrics), allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise PatrickStarError(
                f"the metrics file {str(self.path)!r} cannot be written any more at step "
                f"{metrics.step} ({error.strerror}); make room or choose another place with "
                "--metrics FILE"
            ) from error

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()


def events_of(metrics: StepMetrics, samples: int) -> list[Event]:
    """What a step adds to the events that the engine hands to the config's monitors.

    Args:
        samples: trained on so far.
    """
    values: dict[str, float | None] = {
        "Train/Samples/grad_norm": metrics.grad_norm,
        "Train/Samples/step_time_s": metrics.step_time_s,
        "Train/Samples/tokens_per_s": metrics.tokens_per_s,
        **{f"Memory/peak_bytes/{tier}": peak for tier, peak in metrics.peak_bytes.items()},
        **{f"Memory/moved_bytes/{pair}": moved for pair, moved in metrics.moved_bytes.items()},
    }
    return [(name, value, samples) for name, value in values.items() if value is not None]


class Totals:
    """What a run came to so far.

    Attributes:
        steps: how many steps were made.
        first_loss: of the first step.
        peak: highest bytes by tier, construction included.
        budget: bytes by tier, None for no limit.
        seconds: spent in steps.
    """

    def __init__(self, report: MemoryReport) -> None:
        self.steps = 0
        self.first_loss: float | None = None
        self.peak = {name: usage.peak for name, usage in report.tiers.items()}
        self.budget = {name: usage.budget for name, usage in report.tiers.items()}
        self.seconds = 0.0
        self._losses: deque[float] = deque(maxlen=_LAST)
        self._moved: dict[str, int] = {}
        self._tokens = 0.0

    def add(self, metrics: StepMetrics) -> None:
        self.steps += 1
        if self.first_loss is None:
            self.first_loss = metrics.loss
        self._losses.append(metrics.loss)
        for name, peak in metrics.peak_bytes.items():
            self.peak[name] = max(self.peak.get(name, 0), peak)
        for pair, moved in metrics.moved_bytes.items():
            self._moved[pair] = self._moved.get(pair, 0) + moved
        self.seconds += metrics.step_time_s
        self._tokens += metrics.tokens_per_s * metrics.step_time_s

    @property
    def last_losses(self) -> tuple[float, int]:
        """The mean loss of the last steps, and of how many."""
        return sum(self._losses) / len(self._losses), len(self._losses)

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self.seconds

    @property
    def moved_per_step(self) -> dict[str, float]:
        """Mean bytes a step, by "from->to"."""
        return {pair: moved / self.steps for pair, moved in self._moved.items()}
