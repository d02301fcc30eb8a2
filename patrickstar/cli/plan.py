"""`patrickstar plan`: does it fit, how fast, what limits it, what would help; before a run.

This file is the surface; `patrickstar.planning` finds the answer and `plan_display` shows it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
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
from patrickstar.cli.plan_display import show
from patrickstar.cli.run_config import Overrides, micro_batch_size, run_config
from patrickstar.errors import ConfigError
from patrickstar.machine import shipped_names
from patrickstar.models import PRESETS
from patrickstar.planning.plan import plan as planned

_EXAMPLE = """\b
The budgets of a run, and another machine:
  patrickstar plan --model gpt-4b --host-memory 14GiB --disk /scratch
  patrickstar plan --model gpt-4b --machine laptop-8gb --disk /scratch
"""


def _machines(started: str) -> list[str]:
    return [name for name in shipped_names() if name.startswith(started)]


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Preset: {', '.join(PRESETS)}. [{DEFAULT_MODEL}]",
            autocompletion=preset_names,
        ),
    ] = None,
    hf_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hugging Face config.json. [none]")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your own provider. [none]")
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
        str | None,
        typer.Option(
            metavar="FILE", help="Or a name such as laptop-8gb. [this]", autocompletion=_machines
        ),
    ] = None,
    remeasure: Annotated[
        bool, typer.Option("--remeasure", help="Measure this machine again.")
    ] = False,
    world_size: Annotated[int, typer.Option(metavar="N", min=1, help="Data parallel ranks.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help='Leave out "what if".')] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    with reported(debug=debug):
        choice = _choose(model, hf_config, provider, checkpoint_activations)
        recomputing = None
        if provider is None:
            recomputing = _choose(model, hf_config, None, not checkpoint_activations).build
        overrides = Overrides(batch_size, None, device_memory, host_memory, disk)
        settings = run_config(config, overrides)
        batch, length = micro_batch_size(settings), sequence_length(tokens, choice)
        inputs = torch.zeros(batch, length, dtype=torch.long, device="meta")
        found = planned(
            choice.build,
            settings,
            inputs,
            inputs,
            machine=machine,
            remeasure=remeasure,
            world_size=world_size,
            recomputing=recomputing,
            what_if=not quick,
        )
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        show(Console(), f"{choice.name}, micro-batches of {batch} x {length} tokens", found)
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
        raise ConfigError(
            f"--provider {name!r} cannot be imported ({error}); it is MODULE:FUNCTION, with the "
            "module found from this folder or installed"
        ) from error
    if not callable(found):
        raise ConfigError(f"--provider {name!r} is no MODULE:FUNCTION with a callable")
    made: Callable[[], nn.Module] = found
    return made
