"""What a terminal shows while a model trains."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from patrickstar.cli.display import progress, summarise
from patrickstar.cli.loop import StepMetrics
from patrickstar.cli.metrics import MetricsFile, Totals
from patrickstar.memory.sizes import format_bytes

from .fake_engine import Report, Usage

REPORT = Report(
    {"host": Usage(3 << 20, 5 << 20, 8 << 20), "disk": Usage(1 << 20, 1 << 20, None)},
    {"host->disk": 0},
)


def step(number: int, moved: int = 0) -> StepMetrics:
    return StepMetrics(number, 2.5, 0.1, 1.0, 0.5, 1234.5, {"host": 6 << 20}, {"host->disk": moved})


def shown_on_a_terminal(report: Report) -> list[str]:
    """What stands on the screen at the end, without colours."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=100)
    with progress(console, 2) as show:
        show(step(1), REPORT)
        show(step(2), report)
    return re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", out.getvalue()).splitlines()


def test_a_terminal_shows_the_loss_and_the_speed() -> None:
    line = next(line for line in reversed(shown_on_a_terminal(REPORT)) if "2/2" in line)
    assert "loss 2.5000" in line and "1,234 tokens/s" in line


@pytest.mark.parametrize("used, filled", [(0, 0), (2, 6), (4, 12), (8, 24)])
def test_a_terminal_shows_how_much_of_its_budget_a_tier_uses(used: int, filled: int) -> None:
    report = Report({"host": Usage(used << 20, 0, 8 << 20)}, {})
    line = next(line for line in reversed(shown_on_a_terminal(report)) if "host" in line)
    assert line.endswith(f"{format_bytes(used << 20)} of 8.00 MiB")
    assert line.count("━") == filled


@pytest.mark.parametrize("budget", [None, 0])
def test_a_tier_without_room_to_fill_has_no_bar(budget: int | None) -> None:
    report = Report({"disk": Usage(1 << 20, 0, budget)}, {})
    line = next(line for line in reversed(shown_on_a_terminal(report)) if "disk" in line)
    assert "1.00 MiB" in line and "━" not in line


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
