"""`patrickstar import-checkpoint`: a run of DeepSpeed's goes on as one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from patrickstar.checkpoint.deepspeed import import_checkpoint as take_over
from patrickstar.checkpoint.manifest import read_manifest
from patrickstar.cli.failure import reported
from patrickstar.memory.sizes import format_bytes

_EXAMPLE = """\b
All of the latest one: weights, masters, moments, step, scale, schedule:
  patrickstar import-checkpoint runs/ds --output runs/ps
One by its tag, for a script:
  patrickstar import-checkpoint runs/ds --tag step200 --output runs/ps \\
    --json
Then, in the training script:
  model.load_checkpoint("runs/ps")
"""


def import_checkpoint(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Checkpoints of ZeRO stage 1, 2 or 3, or one of them.", exists=True
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where PatrickStar's checkpoints are.")
    ],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Which one. [the latest]")] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Update rule to go on with. [told from its states]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    with reported(debug=debug):
        path, lost = take_over(folder, output, tag, optimizer=optimizer)
        found = summary(path, lost)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(
        f"{found['checkpoint']}: step {found['global_steps']}, {found['optimizer']}, "
        f"{found['parameters']} parameters, {format_bytes(found['bytes'])}"
    )
    for what in lost:
        typer.echo(f"not taken over: {what}")
    typer.echo(f"continue with model.load_checkpoint({str(output)!r})")


import_checkpoint.__doc__ = (
    "Write a checkpoint of DeepSpeed's as one of PatrickStar's.\n\n"
    "DeepSpeed need not be installed, and nothing in the checkpoint is run.\n\n" + _EXAMPLE
)


def summary(path: Path, lost: list[str]) -> dict[str, Any]:
    """What of the new checkpoint `path` a caller may want to know, as JSON."""
    manifest = read_manifest(path)
    state, schedule = manifest.state, manifest.state["scheduler"]
    return {
        "checkpoint": str(path),
        "global_steps": state["counters"]["global_steps"],
        "skipped_steps": state["counters"]["skipped_steps"],
        "optimizer": state["optimizer"]["type"],
        "parameters": len(state["parameters"]),
        "bytes": sum(record.nbytes for record in manifest.files.values()),
        "loss_scale": None if state["loss_scale"] is None else state["loss_scale"]["state"],
        "scheduler": None if schedule is None else schedule["type"],
        "not_taken_over": lost,
    }
