"""The parts of a report as data: a title, a sentence on how to read it, figures and tables.

Nothing here knows HTML; `page` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from patrickstar.memory.sizes import format_bytes
from patrickstar.report.chunk_map import chunk_map_figure
from patrickstar.report.curves import loss_curve, rate_curve, speed_curve
from patrickstar.report.look import Figure
from patrickstar.report.memory import memory_figure
from patrickstar.report.reality import compared, reality_figure
from patrickstar.report.run import Run
from patrickstar.report.timeline import overlap, timeline_figure


@dataclass(frozen=True)
class Table:
    """Rows of texts, the first of each being its name; `head` may be empty."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Section:
    """`figures` are side by side where there is room if `paired`, else one below the other."""

    id: str
    title: str
    text: str
    figures: list[tuple[str, Figure]] = field(default_factory=list)
    table: Table | None = None
    paired: bool = False


def sections(run: Run) -> list[Section]:
    """What there is to show of a run; a part without data is left out."""
    found = [_curves(run), _memory(run), _timeline(run), _chunks(run), _reality(run)]
    return [section for section in found if section is not None] + [_facts(run)]


def tiles(run: Run) -> list[tuple[str, str]]:
    """The few numbers that say how the run went."""
    series = run.series
    found: list[tuple[str, str]] = []
    _, losses = series.points("loss")
    if losses:
        found.append(("loss", f"{losses[0].mean:.4g} → {losses[-1].mean:.4g}"))
    tokens, seconds = series.mean("tokens"), series.mean("step_time_s")
    if tokens is not None and seconds:  # over the whole time, as the summary of training has it
        found.append(("tokens/s", f"{tokens / seconds:,.0f}"))
    if seconds is not None:
        found.append(("a step", duration(seconds)))
    for tier, budget in run.budgets.items():
        _, peaks = series.points(f"peak {tier}")
        if peaks:
            peak = round(max(bucket.high for bucket in peaks))
            of = "" if budget is None else f" of {format_bytes(budget)}"
            found.append((f"peak on the {tier}", format_bytes(peak) + of))
    return found


def _curves(run: Run) -> Section | None:
    curves = {
        "Loss by step": loss_curve(run.series),
        "Speed by step": speed_curve(run.series),
        "Learning rate by step": rate_curve(run.series),
    }
    figures = [(name, figure) for name, figure in curves.items() if figure is not None]
    if not figures:
        return None
    text = f"Steps {run.series.first:,} to {run.series.last:,}."
    if run.series.width > 1:
        text += f" A point is the mean of {run.series.width} steps; the band is their range."
    return Section("curves", "Loss and speed", text, figures, paired=True)


def _memory(run: Run) -> Section | None:
    figures = [
        (f"Memory of the {tier}", figure)
        for tier, budget in run.budgets.items()
        if (figure := memory_figure(run.events, tier, budget)) is not None
    ]
    if not figures:
        return None
    text = (
        f"Step {_step(run)}, moment by moment: a moment begins when other chunks are used. Each "
        "shows the most that was in use in it. Activations are what no chunk owns and comes and "
        "goes; what is there all the time, such as buffers, is other."
    )
    return Section("memory", "Memory", text, figures)


def _timeline(run: Run) -> Section | None:
    figure = timeline_figure(run.events, run.chunks)
    if figure is None:
        return None
    spent = overlap(run.events)
    text = f"Step {_step(run)} took {duration(spent.whole)}. "
    if spent.copying:
        text += (
            f"Chunks were copied for {duration(spent.copying)}, "
            f"{spent.beside / spent.copying:.0%} of it beside the computation; for "
            f"{duration(spent.waiting)} the processor waited. "
        )
    else:
        text += "No chunk was copied. "
    if spent.sending:
        text += (
            f"Collectives ran for {duration(spent.sending)}, "
            f"{spent.sending_beside / spent.sending:.0%} of it beside the computation. "
        )
    text += "Drag to zoom, double-click to see everything again."
    return Section("timeline", "Timeline", text, [("Timeline of a step", figure)])


def _chunks(run: Run) -> Section | None:
    made = chunk_map_figure(run.events, run.chunks, run.facts.weights, list(run.budgets))
    if made is None:
        return None
    figure, drawn, of = made
    text = (
        f"Where the {of:,} chunks were in step {_step(run)}: a row a chunk, a colour a tier. "
        "Point at the end of a bar to see why the copy left."
    )
    if drawn < of:
        text += f" The {drawn:,} that moved most often are drawn."
    return Section("chunks", "Chunk map", text, [("Chunk map", figure)])


def _reality(run: Run) -> Section | None:
    if run.plan is None:
        return None
    rows = [
        (
            row.what,
            format_bytes(row.planned),
            format_bytes(row.measured),
            "-" if row.difference is None else f"{row.difference:+.1%}",
        )
        for row in compared(run.events, run.plan, list(run.budgets))
    ]
    figure = reality_figure(run.events, run.plan, run.budgets)
    return Section(
        "plan",
        "Plan against reality",
        f"What the planner expected of step {_step(run)}, and what came of it. A plan repeats for "
        "ever; in a single step, a copy may still be under way when the step ends.",
        [] if figure is None else [("Planned and measured memory", figure)],
        Table(("", "planned", "measured", "difference"), rows),
    )


def _facts(run: Run) -> Section:
    steps = ", ".join(str(r.step) for r in run.iterations[:40] if r.complete)
    rows = [*run.table.items(), ("steps with events", steps or "none")]
    return Section("run", "The run", "", table=Table((), [tuple(row) for row in rows]))


def duration(seconds: float) -> str:
    """Seconds for people, for example "1.52 s" or "31 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _step(run: Run) -> str:
    return "?" if run.shown is None else f"{run.shown.step:,}"
