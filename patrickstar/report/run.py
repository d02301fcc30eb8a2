"""Reading a run folder: what is there, as far as it goes.

A run that was killed leaves files that end anywhere, and a run may be of any length. So nothing but
the facts is required, what cannot be read is counted and said, and of the events only those of the
one step that is shown are kept, up to a limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from patrickstar.errors import ConfigError, PatrickStarError
from patrickstar.report.format import EVENT, FORMAT, KNOWN, Event, Facts, Plan, Plans, Step, as_text
from patrickstar.report.lines import lines
from patrickstar.report.series import Series

MOST_EVENTS = 100_000  # of one step
_MOST_ITERATIONS = 10_000
_LARGEST = 64 << 20  # bytes of a file that is read whole
_OUTLINE = (b'{"event": "iteration"', b'{"event": "end"', b'{"event": "chunk"')
_Model = TypeVar("_Model", bound=BaseModel)


class RunFolderError(PatrickStarError, ValueError):
    """A folder holds no recorded run, or nothing of it that can be shown."""


class NoSuchRunError(RunFolderError, ConfigError):
    """What was asked for is not there: the folder, a run in it, or a step."""


@dataclass(frozen=True)
class Recorded:
    """Where an iteration with events is in the file; `complete` if it ended with a step."""

    offset: int
    step: int
    planned: bool
    complete: bool


@dataclass
class Run:
    """What a run folder has.

    Attributes:
        name: of the folder.
        facts: what was known at the start; `table` has the rest of them as texts.
        series: the metrics of all steps: loss, lr, grad_norm, step_time_s, tokens_per_s, tokens,
            and "peak TIER" and "moved WAY" in bytes.
        iterations: those that events were kept of.
        shown: one of them, or None; `events` are its events.
        plan: the plan that it followed, if there was one.
        notices: what is missing, and why, in sentences.
    """

    name: str
    facts: Facts
    table: dict[str, str]
    series: Series
    iterations: list[Recorded] = field(default_factory=list)
    shown: Recorded | None = None
    events: list[Event] = field(default_factory=list)
    chunks: dict[int, tuple[str, int]] = field(default_factory=dict)
    plan: Plan | None = None
    notices: list[str] = field(default_factory=list)

    @property
    def budgets(self) -> dict[str, int | None]:
        """Of the tiers, fastest first."""
        return {tier.name: tier.budget for tier in self.facts.tiers}


def read_run(folder: str | os.PathLike[str], step: int | None = None) -> Run:
    """Read a recorded run.

    Args:
        step: whose events are kept; the last complete one that followed a plan if not given.

    Raises:
        RunFolderError: the folder is no run, is of a later format, or has no events of `step`.
    """
    folder = Path(folder)
    facts = _facts(folder)
    run = Run(folder.resolve().name, facts, as_text(facts.model_extra or {}), Series())
    _read_steps(run, folder)
    events = folder / "events.jsonl"
    if events.is_file():
        _find_iterations(run, events)
        _choose(run, step)
        _read_events(run, events)
        _read_plan(run, folder)
    elif step is not None:
        raise NoSuchRunError(f"{str(folder)!r} has no events.jsonl, so step {step} cannot be shown")
    if not run.events:
        run.notices.append(
            "No step has events, so there is no memory, timeline or chunk map to show: the run "
            "ended before its first step was over."
        )
    return run


def iterate_events(folder: Path) -> Iterator[Event]:
    """Every event of a run that can be read, in the order of the file."""
    for _, line in lines(folder / "events.jsonl"):
        event = _event(line)
        if event is not None:
            yield event


def _facts(folder: Path) -> Facts:
    path = folder / "facts.json"
    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise NoSuchRunError(
            f"the run folder {str(folder)!r} {what}; give one that `patrickstar train --record "
            'FOLDER` or the key "patrickstar": {"record": FOLDER} has written'
        )
    if not path.is_file():
        raise NoSuchRunError(
            f"{str(folder)!r} holds no recorded run, facts.json is missing; record one with "
            "`patrickstar train --record FOLDER`"
        )
    facts = _whole(path, Facts)
    if facts is None:
        raise RunFolderError(
            f"{str(path)!r} is damaged or was not written by PatrickStar; record the run again"
        )
    if facts.format > FORMAT:
        raise RunFolderError(
            f"{str(folder)!r} was recorded in format {facts.format}, and this version reads up to "
            f"{FORMAT}; update PatrickStar"
        )
    return facts


def _whole(path: Path, model: type[_Model]) -> _Model | None:
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return model.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _read_steps(run: Run, folder: Path) -> None:
    """From `metrics.jsonl` if the command line wrote one, since it knows of tokens."""
    for name in ("metrics.jsonl", "steps.jsonl"):
        path = folder / name
        if not path.is_file():
            continue
        unreadable = 0
        for _, line in lines(path):
            try:
                step = Step.model_validate_json(line)
            except ValidationError:
                unreadable += 1
                continue
            run.series.add(step.step, _values(step, run.budgets))
        if unreadable:
            run.notices.append(f"{unreadable} line(s) of {name} could not be read.")
        if run.series.count:
            return
    run.notices.append("No step was completed, so there are no curves.")


def _values(step: Step, tiers: dict[str, int | None]) -> dict[str, float | None]:
    ways = [f"{source}->{target}" for source in tiers for target in tiers if source != target]
    return {
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "step_time_s": step.step_time_s,
        "tokens_per_s": step.tokens_per_s,
        "tokens": None if step.tokens_per_s is None else step.tokens_per_s * step.step_time_s,
        **{f"peak {tier}": step.peak_bytes.get(tier) for tier in tiers},
        **{f"moved {way}": step.moved_bytes.get(way) for way in ways},
    }


def _find_iterations(run: Run, path: Path) -> None:
    """Note where iterations begin, and every chunk's kind and size."""
    begun: tuple[int, int, bool] | None = None
    for offset, line in lines(path):
        if not line.startswith(_OUTLINE):
            continue
        event = _event(line)
        if event is None:
            continue
        if event.event == "chunk":
            run.chunks[event.chunk] = (event.kind, event.bytes)
        elif event.event == "iteration":
            _note(run, begun, complete=False)
            begun = (offset, event.step, event.planned)
        elif event.event == "end":
            _note(run, begun, complete=event.complete)
            begun = None
    _note(run, begun, complete=False)


def _note(run: Run, begun: tuple[int, int, bool] | None, *, complete: bool) -> None:
    if begun is not None and len(run.iterations) < _MOST_ITERATIONS:
        offset, step, planned = begun
        run.iterations.append(Recorded(offset, step, planned, complete))


def _choose(run: Run, step: int | None) -> None:
    candidates = [r for r in run.iterations if step is None or r.step == step]
    if step is not None and not candidates:
        there = sorted({recorded.step for recorded in run.iterations})
        some = ", ".join(map(str, there[:30])) or "none"
        raise NoSuchRunError(f"there are no events of step {step}; steps with events: {some}")
    run.shown = max(candidates, key=lambda r: (r.complete, r.planned, r.offset), default=None)


def _read_events(run: Run, path: Path) -> None:
    if run.shown is None:
        return
    unreadable = 0
    for offset, line in lines(path, run.shown.offset):
        event = _event(line)
        if event is None:
            unreadable += not _is_unknown(line)
            continue
        if event.event == "iteration" and offset != run.shown.offset:
            break
        run.events.append(event)
        if event.event == "end":
            break
        if len(run.events) == MOST_EVENTS:
            run.notices.append(
                f"Step {run.shown.step} has more than {MOST_EVENTS:,} events; the first are shown."
            )
            break
    if unreadable:
        run.notices.append(f"{unreadable} event(s) of step {run.shown.step} could not be read.")
    if not run.shown.complete:
        run.notices.append(
            f"Step {run.shown.step} did not end with an update: the run was killed or interrupted "
            "in it, or only looked at outputs. What is there of it is shown."
        )


def _read_plan(run: Run, folder: Path) -> None:
    first = run.events[0] if run.events else None
    if first is None or first.event != "iteration" or first.plan is None:
        return
    plans = _whole(folder / "plan.json", Plans)
    if plans is None or not 0 <= first.plan < len(plans.plans):
        run.notices.append("The plan of this step is missing from plan.json.")
        return
    run.plan = plans.plans[first.plan]


def _event(line: bytes) -> Event | None:
    try:
        return EVENT.validate_json(line)
    except ValidationError:
        return None


def _is_unknown(line: bytes) -> bool:
    """Whether this is a whole event of a kind that a later version added."""
    prefix = b'{"event": "'
    name = line[len(prefix) :].split(b'"', 1)[0]
    return line.startswith(prefix) and line.endswith(b"}\n") and name.decode("latin1") not in KNOWN
