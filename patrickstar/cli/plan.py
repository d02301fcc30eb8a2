"""`patrickstar plan`: does it fit, what is the least that works, and what moves, before a run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from patrickstar.cli.failure import reported
from patrickstar.cli.model_choice import (
    DEFAULT_MODEL,
    LONGEST_DEFAULT_SEQUENCE,
    ModelChoice,
    choose,
    preset_names,
    sequence_length,
)
from patrickstar.cli.run_config import Overrides, micro_batch_size, run_config
from patrickstar.config import load_config
from patrickstar.engine.estimate import Estimate, MachineFacts, StepTime, estimate, step_time
from patrickstar.engine.from_config import settings_from
from patrickstar.errors import ConfigError
from patrickstar.memory.sizes import format_bytes

_EXAMPLE = """\b
The same budgets as for `patrickstar train`, answered in seconds:
  patrickstar plan --model gpt-4b --host-memory 14GiB --disk /scratch
"""


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Preset. [{DEFAULT_MODEL}]", autocompletion=preset_names
        ),
    ] = None,
    hf_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hugging Face config.json instead.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own model_provider instead.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON config. [bf16, AdamW, clip 1]")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences. [the config's, or 1]")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--sequence-length",
            metavar="N",
            min=1,
            help=f"Tokens. [the model's, {LONGEST_DEFAULT_SEQUENCE} at most]",
        ),
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget, such as 1GiB. [none]")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget, such as 2GiB. [no limit]")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="PATH[:SIZE]", help="Folder to spill to. [none]")
    ] = None,
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute them in the backward.")
    ] = False,
    machine: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Rates of a machine, to predict the step time. [none]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    with reported(debug=debug):
        choice = _choose(model, hf_config, provider, checkpoint_activations)
        overrides = Overrides(batch_size, None, device_memory, host_memory, disk)
        settings = run_config(config, overrides)
        batch, length = micro_batch_size(settings), sequence_length(tokens, choice)
        inputs = torch.zeros(batch, length, dtype=torch.long, device="meta")
        # Budgets are only read: planning makes no spool file.
        run = settings_from(load_config(settings))
        found = estimate(choice.build, ((inputs, inputs), {}), run)
        time = None if machine is None else step_time(found, _facts(machine))
    if as_json:
        answer = dataclasses.asdict(found)
        if time is not None:
            answer["step_time_s"] = {**dataclasses.asdict(time), "total": time.total}
        typer.echo(json.dumps(answer, indent=2))
    else:
        _show(Console(), choice.name, batch, length, found, time)
    raise typer.Exit(0 if found.fits else 1)


plan.__doc__ = f"Say whether a run fits, what it moves, and the least that works.\n\n{_EXAMPLE}"


def _choose(
    model: str | None, hf_config: Path | None, provider: str | None, checkpointing: bool
) -> ModelChoice:
    if sum(given is not None for given in (model, hf_config, provider)) > 1:
        raise ConfigError("--model, --hf-config and --provider exclude each other; give one")
    if provider is not None:
        return ModelChoice(provider, _import(provider), None)
    return choose(model, hf_config, checkpointing=checkpointing)


def _import(name: str) -> Callable[[], nn.Module]:
    module, colon, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--provider {name!r} cannot be imported ({error})") from error
    if not callable(found):
        raise ConfigError(f"--provider {name!r} is no MODULE:FUNCTION with a callable")
    made: Callable[[], nn.Module] = found
    return made


def _facts(file: Path) -> MachineFacts:
    try:
        return MachineFacts.of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"the machine file {str(file)!r} cannot be read ({error})") from error


def _show(
    console: Console, name: str, batch: int, length: int, found: Estimate, time: StepTime | None
) -> None:
    verdict = "fits" if found.fits else "does not fit"
    console.print(
        f"{name}, {found.parameters / 1e6:,.1f}M parameters, micro-batches of {batch} x {length} "
        f"tokens: {verdict}\n"
    )
    table = Table("tier", "budget", "smallest that works", "peak", box=None)
    for tier, row in found.tiers.items():
        table.add_row(tier, *(_bytes(n) for n in (row.budget, row.smallest, row.peak or row.held)))
    console.print(table)
    console.print(
        f"\n  state         {format_bytes(found.state_bytes)} in {found.chunks} groups of chunks "
        f"of up to {found.chunk_elements:,} weights\n"
        f"  activations   {format_bytes(found.activation_bytes)} at their peak"
    )
    for way, nbytes in found.moved.items():
        console.print(f"  {way:<13} {format_bytes(nbytes)} a step")
    if time is not None:
        console.print(
            f"  step          {time.total:.2f} s at best: compute {time.compute:.2f}, update "
            f"{time.update:.2f}, transfer {time.transfer:.2f}; {time.bottleneck} is the bottleneck"
        )


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
