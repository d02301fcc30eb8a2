"""`patrickstar export-checkpoint`: weights for other programs, transformers among them."""

from __future__ import annotations

import functools
import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from patrickstar.checkpoint.exporting import export_weights, names_for
from patrickstar.cli.failure import reported
from patrickstar.cli.hugging_face import architecture_of, read_config
from patrickstar.memory.sizes import format_bytes, parse_bytes

_EXAMPLE = """\b
The weights of the latest checkpoint in runs, as model.safetensors:
  patrickstar export-checkpoint runs --output weights
The fp32 master weights, in files of at most 2 GB:
  patrickstar export-checkpoint runs --output weights --dtype float32 \\
    --shard-size 2GB
A folder that transformers' from_pretrained loads:
  patrickstar export-checkpoint runs --output my-llama --hf config.json
"""


class Precision(str, Enum):
    """What floating-point weights are written in."""

    TRAINED = "trained"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export_checkpoint(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Checkpoints of PatrickStar.", exists=True)
    ],
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")],
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="Which one. [the latest]")] = None,
    hf: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="config.json of this Hugging Face model. [none]"),
    ] = None,
    dtype: Annotated[
        Precision, typer.Option(help="Precision of the weights; float32 takes the masters.")
    ] = Precision.TRAINED,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Longest file, unless one tensor is longer.")
    ] = "5GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    with reported(debug=debug):
        longest, config, rename = parse_bytes(shard_size), None, None
        if hf is not None:
            config = read_config(hf)
            model = architecture_of(config, hf)
            rename = functools.partial(
                names_for, expected=model.shapes, aliases=model.tied, what=model.name
            )
        wanted = None if dtype is Precision.TRAINED else getattr(torch, dtype.value)
        made = export_weights(
            folder, output, tag, dtype=wanted, config=config, rename=rename, shard_bytes=longest
        )
    if as_json:
        found: dict[str, Any] = {
            "folder": str(made.folder),
            "tensors": len(made.names),
            "bytes": made.nbytes,
            "left_out": made.left_out,
            "from_pretrained": made.has_config,
        }
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(f"{made.folder}: {len(made.names)} tensors, {format_bytes(made.nbytes)}")
    for name in made.left_out:
        typer.echo(f"left out: {name}")


export_checkpoint.__doc__ = (
    f"Write a checkpoint's weights for other programs, as safetensors.\n\n{_EXAMPLE}"
)
