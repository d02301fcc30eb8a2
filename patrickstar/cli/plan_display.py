"""How a plan looks to a person: verdict, tiers, the step, memory over time, what would help."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from patrickstar.memory.sizes import format_budget, format_bytes, size_at_least
from patrickstar.planning.parallel import DataParallel
from patrickstar.planning.plan import RunPlan

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_BUSY = 0.2
_NOT_KNOWN = "may or may not fit; how much ranks gather at once shows when they run"


def show(console: Console, title: str, found: RunPlan) -> None:
    """Print `found`."""
    verdict = "fits" if found.fits else "does not fit" if found.known else _NOT_KNOWN
    console.print(
        f"{title}, {found.parameters / 1e6:,.1f}M parameters: {verdict}\n", soft_wrap=True
    )
    console.print(_tiers(found))
    console.print(
        "\nA tier needs its smallest that works; its peak is the most that it holds with these "
        "budgets" + (", a disk's that of a planned step." if "disk" in found.tiers else "."),
        highlight=False,
        soft_wrap=True,
    )
    _facts(console, found)
    _step(console, found)
    _over_time(console, found)
    if found.what_if:
        console.print()
        console.print(_what_if(found))
    if found.parallel is not None:
        console.print()
        console.print(_parallel(found.parallel))


def sparkline(values: Sequence[int], top: int, width: int = _WIDTH) -> str:
    """`values`, which follow each other evenly, as bars of heights up to `top`.

    Every bar is the highest of the values that it stands for.
    """
    if not values or top <= 0:
        return ""
    width = min(width, len(values))
    bars = []
    for bar in range(width):
        first, last = bar * len(values) // width, (bar + 1) * len(values) // width
        height = max(values[first:last]) / top
        bars.append(_BARS[min(len(_BARS) - 1, int(height * len(_BARS)))])
    return "".join(bars)


def evenly(values: Sequence[int], begins: Sequence[float], step: float, parts: int) -> list[int]:
    """`values` that begin at `begins`, by time: the highest in each of `parts` parts of `step`."""
    found = [0] * parts
    ends = [*begins[1:], step]
    for value, begin, end in zip(values, begins, ends, strict=True):
        first = min(parts - 1, int(begin / step * parts))
        last = min(parts - 1, int(end / step * parts))
        for part in range(first, last + 1):
            found[part] = max(found[part], value)
    return found


def _tiers(found: RunPlan) -> Table:
    table = Table("tier", "budget", "smallest that works", "peak", box=None)
    for name, tier in found.tiers.items():
        shown = format_bytes if tier.fits else format_budget
        budget = "-" if tier.budget is None else shown(tier.budget)
        lacks = "" if tier.fits else "  (too small)"
        # Rounded up, so that the number that is read here is a budget that works.
        smallest = size_at_least(tier.smallest)
        file = f", in a file of {format_bytes(tier.reserved)}" if tier.reserved else ""
        table.add_row(name, budget + lacks, smallest, format_bytes(tier.peak) + file)
    return table


def _facts(console: Console, found: RunPlan) -> None:
    rows = {
        "state": f"{format_bytes(found.state_bytes)} in {found.chunks} groups of chunks of up to "
        f"{found.chunk_elements:,} weights",
        "activations": f"{format_bytes(found.activation_bytes)} at their peak",
        **{way: f"{format_bytes(n)} a step" for way, n in found.moved.items() if n},
    }
    console.print()
    for name, value in rows.items():
        console.print(f"  {name:<13} {value}", highlight=False, soft_wrap=True)


def _step(console: Console, found: RunPlan) -> None:
    step = found.step
    if step is None:
        return
    kind = "" if step.measured else " at best"
    parts = [f"compute {_s(step.compute)}", f"update {_s(step.update)}"]
    parts += [f"waiting for the {lane} {_s(seconds)}" for lane, seconds in step.waiting.items()]
    lines = [f"{_s(step.total)}{kind}: {', '.join(parts)}"]
    lines += [
        f"the {lane} works {_s(seconds)}, so {_s(max(0, seconds - step.waiting.get(lane, 0)))} is "
        "hidden behind computing"
        for lane, seconds in step.busy.items()
    ]
    lines.append(f"bottleneck: {step.bottleneck}")
    for number, line in enumerate(lines):
        console.print(f"  {'' if number else 'step':<13} {line}", highlight=False, soft_wrap=True)
    source = "published figures" if found.source.startswith("published figures") else found.source
    console.print(f"  {'machine':<13} {found.machine}, {source}", highlight=False, soft_wrap=True)
    if found.others > _BUSY:
        console.print(
            f"  {'':<13} measured while other programs used {found.others:.0%} of the processors; "
            "use --remeasure when it is quiet",
            highlight=False,
            soft_wrap=True,
        )


def _over_time(console: Console, found: RunPlan) -> None:
    for name, values in found.usage.items():
        if not values:
            continue
        top = found.tiers[name].budget or found.tiers[name].peak
        shown = values
        if found.step is not None and len(found.moments) == len(values):
            shown = evenly(values, found.moments, found.step.total, _WIDTH)
        console.print(
            f"  {name:<13} {sparkline(shown, top)} of {format_bytes(top)}",
            highlight=False,
            soft_wrap=True,
        )


def _what_if(found: RunPlan) -> Table:
    table = Table("what if", "fits", "step", "speed", "moved a step", box=None)
    for change in found.what_if:
        table.add_row(
            change.change,
            "yes" if change.fits else "no",
            "-" if change.step_s is None else _s(change.step_s),
            "-" if change.speed is None else f"x {change.speed:.2f}",
            format_bytes(change.moved),
        )
    return table


def _parallel(found: DataParallel) -> Table:
    table = Table(
        "stage", "sent a rank", "state a rank", "links", "step", "fits", box=None,
        title=f"{found.world_size:,} ranks on {found.nodes:,} nodes, on paper",
        title_justify="left",
    )  # fmt: skip
    for stage in found.stages:
        table.add_row(
            str(stage.stage),
            format_bytes(stage.volume_bytes),
            format_bytes(stage.state_bytes),
            "-" if stage.communication_s is None else _s(stage.communication_s),
            "-" if stage.step_s is None else _s(stage.step_s),
            "not known" if stage.fits is None else "yes" if stage.fits else "no",
        )
    return table


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
