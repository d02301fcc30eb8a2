"""What a terminal shows while a model trains."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from patrickstar.cli.display import progress, summarise
from patrickstar.cli.loop import StepMetrics
from patrickstar.cli.metrics import MetricsFile, Totals

from .fake_engine import Report, Usage

REPORT = Report(
    {"host": Usage(3 << 20, 5 << 20, 8 << 20), "disk": Usage(1 << 20, 1 << 20, None)},
    {"host->disk": 0},
)


def step(number: int, moved: int = 0) -> StepMetrics:
    return StepMetrics(number, 2.5, 0.1, 1.0, 0.5, 1234.5, {"host": 6 << 20}, {"host->disk": moved})


def test_a_terminal_shows_loss_speed_and_every_tier_against_its_budget() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with progress(console, 2) as show:
        show(step(1), REPORT)
        show(step(2), REPORT)
    shown = out.getvalue()
    assert "2/2" in shown and "loss 2.5000" in shown and "tokens/s" in shown
    assert "host 3.00 MiB of 8.00 MiB  disk 1.00 MiB" in shown


@pytest.mark.parametrize("moved, expected", [(0, "nothing"), (3 << 20, "host->disk 2.00 MiB")])
def test_the_summary_has_peaks_against_budgets_and_the_mean_movement(
    moved: int, expected: str
) -> None:
    out = io.StringIO()
    totals = Totals(REPORT)
    totals.add(step(1, moved))
    totals.add(step(2, moved // 3))
    summarise(Console(file=out), totals, MetricsFile(None), resident=1 << 30)
    lines = {line[2:16].strip(): line[16:] for line in out.getvalue().splitlines()}
    assert lines["peak host"] == "6.00 MiB of 8.00 MiB"
    assert lines["peak disk"] == "1.00 MiB"
    assert lines["moved a step"] == expected
    assert lines["process peak"] == "1.00 GiB resident"
    assert lines["speed"].startswith("1,234 tokens/s, 0.50 s a step")
