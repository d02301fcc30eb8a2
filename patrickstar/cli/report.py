"""`patrickstar report` and `patrickstar trace`: look at a recorded run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from patrickstar.cli.failure import reported
from patrickstar.errors import ConfigError
from patrickstar.report import page, read_run, trace_events
from patrickstar.report.run import iterate_events

_RECORD = """\b
  patrickstar train --record runs/first
"""

Folder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="What --record wrote.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def report(
    run_dir: Folder,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="HTML. [RUN_DIR/report.html]"),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Show this step. [last planned one recorded]"),
    ] = None,
    debug: Debug = False,
) -> None:
    with reported(debug=debug):
        run = read_run(run_dir, step)
        target = run_dir / "report.html" if output is None else output
        _write(target, [page(run)])
        for notice in run.notices:
            typer.echo(f"patrickstar: {notice}", err=True)
        typer.echo(f"wrote {target}; open it in a browser")


def trace(
    run_dir: Folder,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="JSON. [RUN_DIR/trace.json]"),
    ] = None,
    debug: Debug = False,
) -> None:
    with reported(debug=debug):
        run = read_run(run_dir)
        target = run_dir / "trace.json" if output is None else output
        events = trace_events(iterate_events(run_dir) if run.events else [], run.budgets)
        _write(target, _as_json(json.dumps(event) for event in events))
        typer.echo(f"wrote {target}; open it in ui.perfetto.dev or chrome://tracing")


def _as_json(events: Iterable[str]) -> Iterable[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, event in enumerate(events):
        yield (",\n" if number else "") + event
    yield "\n]}\n"


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write the file whole, or leave what was there."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("w", encoding="utf-8") as file:
                file.writelines(parts)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}); choose another --output FILE"
        ) from error


report.__doc__ = f"""Make one HTML page of a recorded run: curves, memory, timeline, chunks, plan.

\b
Record a run, then look at it:
{_RECORD[2:]}  patrickstar report runs/first --output first.html
"""
trace.__doc__ = f"""Export a recorded run for Perfetto or chrome://tracing.

\b
Record a run, then export it:
{_RECORD[2:]}  patrickstar trace runs/first --output first.json
"""
