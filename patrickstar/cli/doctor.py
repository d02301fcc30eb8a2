"""`patrickstar doctor`: will training work here, what will be slow and why, what to do.

This file is the surface, and decides in which order things are looked at; the checks themselves are
in `patrickstar.machine.software` and `patrickstar.machine.hardware`. The last one trains: whatever
the others overlook, it meets.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from patrickstar.cli.failure import reported
from patrickstar.cli.loop import Initialize
from patrickstar.errors import ConfigError
from patrickstar.machine import Disk, Machine, cache_folder, hardware, measure, software
from patrickstar.machine.check import Check, State, worst
from patrickstar.machine.disks import free_bytes, measure_disk, standing
from patrickstar.machine.limits import (
    available_bytes,
    machine_bytes,
    memory_limit,
    usable_processors,
)
from patrickstar.memory.pinned import page_lock
from patrickstar.models import GPT, preset

_DISK_BYTES = 512 << 20
_EXAMPLE = f"""\b
This machine, with the disk that a run would spill to:
  patrickstar doctor --disk /scratch
For a script:
  patrickstar doctor --json
It takes seconds, and a file of {_DISK_BYTES >> 20} MiB in the folder for that time.
Exit code 0: training will work; 1: something will fail.
"""


def _machine_here() -> Machine:
    return measure(None)


def _disk_here(folder: Path) -> Disk:
    return measure_disk(folder, _DISK_BYTES)


def doctor_command(
    initialize: Initialize,
    measured: Callable[[], Machine] = _machine_here,
    measured_disk: Callable[[Path], Disk] = _disk_here,
) -> Callable[..., None]:
    """The command; it trains with `initialize`.

    Args:
        measured: measures the machine without its disk.
        measured_disk: measures the disk under a folder.
    """

    def doctor(
        disk: Annotated[
            Path, typer.Option(metavar="PATH", help="Folder on the disk to spill to.")
        ] = Path(),
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the traceback of an error.")
        ] = False,
    ) -> None:
        with reported(debug=debug):
            standing(disk)  # a path that is no folder is a usage error
            machine = measured()
            checks = [*_software(), *_hardware(machine)]
            checks += [_disk(disk, measured_disk), _cache(), _training(initialize, disk)]
        if as_json:
            typer.echo(json.dumps(_as_dict(checks, machine), indent=2))
        else:
            _show(checks, min(Console().width, 100))
        raise typer.Exit(int(worst(checks) is State.FAILS))

    doctor.__doc__ = f"Say whether training will work here, and what will be slow.\n\n{_EXAMPLE}"
    return doctor


def _software() -> list[Check]:
    needed = software.requirements()
    kind, _ = hardware.accelerators()
    built, driver = software.platform_of_torch(), software.driver_program()
    return [
        software.check_python(),
        software.check_torch(needed or [], torch.__version__, built, driver),
        *software.check_packages(needed),
        software.check_compiler(kind),
        software.check_ranks(*software.backends_of_torch(), kind),
    ]


def _hardware(machine: Machine) -> list[Check]:
    kind, devices = hardware.accelerators()
    usable, total = usable_processors(), os.cpu_count() or 1
    checks = [
        hardware.check_processors(machine.processor, usable, total, machine.others),
        hardware.check_memory(memory_limit(), machine_bytes(), available_bytes()),
        hardware.check_accelerators(kind, devices),
    ]
    if kind is None:
        return [*checks, hardware.check_pinned(None)]
    device = torch.device(kind, devices[0].index)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if locked == resource.RLIM_INFINITY else locked
    link = hardware.check_pinned(kind, page_lock(device), lambda: hardware.link_rate(device), limit)
    return [*checks, link]


def _disk(folder: Path, measured: Callable[[Path], Disk]) -> Check:
    try:
        return hardware.check_disk(measured(folder), free_bytes(folder))
    except (ConfigError, OSError) as error:
        return Check(
            "disk", State.FAILS, str(standing(folder)), str(error),
            "give --disk a folder that can be written and has room",
        )  # fmt: skip


def _cache() -> Check:
    """Whether what is measured once can be kept."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return Check("cache", State.FINE, str(folder))
    except OSError as error:
        return Check(
            "cache", State.SLOW, f"{folder} cannot be written ({error.strerror})",
            "`patrickstar plan` measures this machine anew every time",
            "set XDG_CACHE_HOME to a folder that can be written",
        )  # fmt: skip


def _training(initialize: Initialize, folder: Path) -> Check:
    """Train a small model, with less memory than its state and the rest on the disk."""
    began, last = time.perf_counter(), 0.0
    shape = preset("gpt-tiny")
    memory = {"host": "10MiB", "disk": str(folder)}
    config = {"bf16": {"enabled": True}, "patrickstar": {"memory": memory}}
    try:
        engine, optimizer = initialize(model_provider=lambda: GPT(shape), config=config)
        try:
            tokens = torch.zeros(1, 32, dtype=torch.long, device=engine.device)
            for _ in range(3):
                loss = engine(tokens, tokens)
                engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                last = loss.item()
        finally:
            engine.close()
    except Exception as error:  # whatever stands in the way of a run is what is looked for
        return Check(
            "training", State.FAILS, f"{type(error).__name__}: {error}",
            "a small model with part of its state on the disk cannot be trained here",
            "mend what fails above; if nothing does, this is worth an issue with this output",
        )  # fmt: skip
    seconds = time.perf_counter() - began
    return Check(
        "training", State.FINE,
        f"3 steps of gpt-tiny in 10 MiB and the disk took {seconds:.1f} s, loss {last:.2f}",
    )  # fmt: skip


def _as_dict(checks: list[Check], machine: Machine) -> dict[str, Any]:
    return {
        "works": worst(checks) is not State.FAILS,
        "checks": [dataclasses.asdict(check) for check in checks],
        "machine": machine.model_dump(),
    }


def _show(checks: list[Check], width: int) -> None:
    for check in checks:
        lines = [f"{check.found}"]
        lines += [f"why: {check.why}"] if check.why else []
        lines += [f"do:  {check.advice}"] if check.advice and check.state is not State.FINE else []
        for number, line in enumerate(lines):
            head = f"{check.state.value:<8}{check.name:<16}" if not number else " " * 24
            typer.echo(
                textwrap.fill(
                    line,
                    max(width, 60),
                    initial_indent=head,
                    subsequent_indent=" " * (24 if not number else 29),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
    typer.echo()
    typer.echo(_verdict(checks))


def _verdict(checks: list[Check]) -> str:
    def named(state: State) -> str:
        return ", ".join(check.name for check in checks if check.state is state)

    parts = []
    if worst(checks) is State.FAILS:
        parts.append(f"Training will fail: {named(State.FAILS)}.")
    else:
        parts.append("Training will work.")
    if named(State.SLOW):
        parts.append(f"Slower than it could be: {named(State.SLOW)}.")
    if named(State.MISSING):
        parts.append(f"Not there, and optional: {named(State.MISSING)}.")
    return " ".join(parts)
