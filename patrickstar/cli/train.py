"""`patrickstar train`: train a model on bytes under memory budgets.

This file is the surface, options and messages; what happens is in `model_choice`, `run_config`,
`loop`, `metrics` and `display`; `budgets` tells of those that are too small.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from patrickstar.cli import display
from patrickstar.cli.budgets import while_made, while_trained
from patrickstar.cli.failure import reported
from patrickstar.cli.loop import Initialize, training_steps
from patrickstar.cli.metrics import MetricsFile, Totals, events_of
from patrickstar.cli.model_choice import (
    DEFAULT_MODEL,
    LONGEST_DEFAULT_SEQUENCE,
    ModelChoice,
    choose,
    preset_names,
    sequence_length,
)
from patrickstar.cli.resident import peak_resident
from patrickstar.cli.run_config import Overrides, make_disk_folder, micro_batch_size, run_config
from patrickstar.data import Batches, Corpus, load_corpus
from patrickstar.engine.launch import rank, world_size
from patrickstar.errors import ConfigError, DataError
from patrickstar.memory.sizes import format_bytes
from patrickstar.models import PRESETS

_OTHERS = [name for name in PRESETS if name != DEFAULT_MODEL]
# \b keeps the line as it is.
_EXAMPLE = """\b
A model of 303M parameters in 2 GiB, with the rest of its state on disk:
  patrickstar train --model gpt-300m --host-memory 2GiB --disk runs/spool
"""

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="JSON config. [bf16, AdamW, clip 1]")
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Preset. [{DEFAULT_MODEL}] Others: {', '.join(_OTHERS)}",
        autocompletion=preset_names,
    ),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Hugging Face config.json to build. [none]"),
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="File or folder. [Python's standard library]"),
]
StepCount = Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer steps.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of weights, batches.")]
BatchSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Sequences. [the config's, or 1]")
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence-length",
        metavar="N",
        min=1,
        help=f"Tokens. [the model's, {LONGEST_DEFAULT_SEQUENCE} at most]",
    ),
]
LearningRate = Annotated[float | None, typer.Option(metavar="X", help="[the config's, or 3e-4]")]
CheckpointActivations = Annotated[
    bool, typer.Option("--checkpoint-activations", help="Recompute them in the backward.")
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Budget, such as 1GiB. [none]")
]
HostMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Budget, such as 2GiB. [no limit]")
]
Disk = Annotated[str | None, typer.Option(metavar="PATH[:SIZE]", help="Folder to spill to. [none]")]
Metrics = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a JSON line a step. [none]")
]
Record = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Record for `report`. [none]")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def train_command(initialize: Initialize) -> Callable[..., None]:
    """The command, training with `initialize`."""

    def train(
        config: ConfigFile = None,
        model: Model = None,
        hf_config: HfConfig = None,
        data: Data = None,
        steps: StepCount = 100,
        seed: Seed = 0,
        batch_size: BatchSize = None,
        tokens: SequenceLength = None,
        learning_rate: LearningRate = None,
        checkpoint_activations: CheckpointActivations = False,
        device_memory: DeviceMemory = None,
        host_memory: HostMemory = None,
        disk: Disk = None,
        metrics: Metrics = None,
        record: Record = None,
        debug: Debug = False,
    ) -> None:
        overrides = Overrides(batch_size, learning_rate, device_memory, host_memory, disk, record)
        with reported(debug=debug):
            choice = choose(model, hf_config, checkpointing=checkpoint_activations)
            settings = run_config(config, overrides)
            batch, length = micro_batch_size(settings), sequence_length(tokens, choice)
            if disk is not None:
                make_disk_folder(disk)
            corpus = _corpus(data)
            batches = Batches(corpus.tokens, batch_size=batch, sequence_length=length, seed=seed)
            mine, ranks = rank(), world_size()
            if mine:  # the first rank tells what happens
                metrics = record = None
            with MetricsFile(metrics) as file, MetricsFile(_recorded(record)) as recorded:
                console = Console(quiet=mine > 0)
                _announce(console, choice, corpus, batch, length)
                torch.manual_seed(seed)
                with while_made(choice, settings, batch, length, ranks=ranks):
                    engine, optimizer = initialize(model_provider=choice.build, config=settings)
                totals = Totals(engine.memory_report())
                try:
                    with while_trained(), display.progress(console, steps) as show:
                        every = training_steps(
                            engine, optimizer, batches, steps, rank=mine, world_size=ranks
                        )
                        for made in every:
                            totals.add(made)
                            file.write(made)
                            recorded.write(made)
                            engine.monitor.write_events(events_of(made, engine.global_samples))
                            show(made, engine.memory_report())
                finally:
                    engine.close()
                    if totals.steps:
                        shown = file if record is None else recorded
                        display.summarise(console, totals, shown, peak_resident())

    train.__doc__ = f"Train a model on bytes under memory budgets.\n\n{_EXAMPLE}"
    return train


def _corpus(data: Path | None) -> Corpus:
    try:
        return load_corpus(data)
    except DataError as error:
        if data is None:
            raise
        raise ConfigError(f"--data: {error}") from error


def _recorded(folder: Path | None) -> Path | None:
    return None if folder is None else folder / "metrics.jsonl"


def _announce(
    console: Console, choice: ModelChoice, corpus: Corpus, batch_size: int, length: int
) -> None:
    left_out = f", {format_bytes(corpus.left_out)} left out" if corpus.left_out else ""
    console.print(
        f"{choice.name} on {corpus.source}: {format_bytes(corpus.tokens.numel())} of "
        f"{corpus.files} files{left_out}, in micro-batches of {batch_size} x {length} tokens",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
