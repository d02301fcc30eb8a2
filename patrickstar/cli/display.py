"""What a person sees while a model trains, and at the end.

On a terminal a progress bar with a bar of memory for every tier under it; elsewhere plain lines,
some for the start and then about twenty for the whole run, so that a log stays readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from patrickstar.cli.loop import MemoryReport, StepMetrics
from patrickstar.cli.metrics import MetricsFile, Totals
from patrickstar.memory.sizes import format_bytes


class Show(Protocol):
    """Shows a step that was just made."""

    def __call__(self, metrics: StepMetrics, report: MemoryReport) -> None: ...


@contextmanager
def progress(console: Console, steps: int) -> Iterator[Show]:
    """What shows the steps of a run of `steps` steps."""
    if not console.is_terminal:
        yield _plain_lines(console, steps)
        return
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    task = bar.add_task("training", total=steps, loss="-", rate="-")
    with Live(bar, console=console, refresh_per_second=8) as live:

        def show(metrics: StepMetrics, report: MemoryReport) -> None:
            bar.update(
                task,
                completed=metrics.step,
                loss=f"{metrics.loss:.4f}",
                rate=f"{metrics.tokens_per_s:,.0f}",
            )
            live.update(Group(bar, _bars(report)))

        yield show


def _plain_lines(console: Console, steps: int) -> Show:
    every = max(1, steps // 20)

    def show(metrics: StepMetrics, report: MemoryReport) -> None:
        if metrics.step <= 2 or metrics.step % every == 0 or metrics.step == steps:
            console.print(
                f"step {metrics.step}/{steps}  loss {metrics.loss:.4f}  "
                f"{metrics.tokens_per_s:,.0f} tokens/s  {_usage(report)}",
                soft_wrap=True,
                highlight=False,
            )

    return show


def _bars(report: MemoryReport) -> Table:
    """A row a tier: how much of its budget is in use. A tier without a budget has no bar."""
    table = Table.grid(padding=(0, 1))
    for name, usage in report.tiers.items():
        budget = usage.budget
        # rich takes a total of 0 for one that is unknown.
        bar = "" if not budget else ProgressBar(total=budget, completed=usage.in_use, width=24)
        table.add_row(f"{name:<6}", bar, _of(usage.in_use, budget))
    return table


def _usage(report: MemoryReport) -> str:
    return "  ".join(
        f"{name} {_of(usage.in_use, usage.budget)}" for name, usage in report.tiers.items()
    )


def _of(used: int, budget: int | None) -> str:
    return format_bytes(used) + ("" if budget is None else f" of {format_bytes(budget)}")


def summarise(console: Console, totals: Totals, metrics: MetricsFile, resident: int) -> None:
    """Print what the run came to. `resident` is the process's peak, in bytes."""
    mean, count = totals.last_losses
    rows: dict[str, str] = {
        "loss": f"{totals.first_loss:.4f} at the first step, {mean:.4f} "
        + (f"over the last {count}" if count > 1 else "at the last"),
        "speed": f"{totals.tokens_per_s:,.0f} tokens/s, "
        f"{totals.seconds / totals.steps:.2f} s a step",
        **{
            f"peak {name}": _of(peak, totals.budget.get(name)) for name, peak in totals.peak.items()
        },
        "moved a step": _moved(totals.moved_per_step),
        "process peak": f"{format_bytes(resident)} resident",
        "metrics": "not written (--metrics FILE writes them)"
        if metrics.path is None
        else str(metrics.path),
    }
    console.print(
        f"\n{totals.steps} step{'' if totals.steps == 1 else 's'} in {totals.seconds:.1f} s",
        highlight=False,
    )
    for name, value in rows.items():
        console.print(f"  {name:<14}{value}", soft_wrap=True, highlight=False, markup=False)


def _moved(per_step: Mapping[str, float]) -> str:
    moved = [f"{pair} {format_bytes(round(n))}" for pair, n in per_step.items() if n]
    return ", ".join(moved) or "nothing"
