"""Facts of this machine, measured once and kept in the user's cache folder.

They are measured again when the processor, the threads or PyTorch are others, or on demand. Disks
are kept by where they are mounted, since one machine has several. What was measured while other
programs used the processors is told and not kept. A file that cannot be read is
measured anew, and one that cannot be written costs only the time to measure next time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from patrickstar.machine.disks import measure_disk, mount_of
from patrickstar.machine.facts import Disk, Facts, Machine
from patrickstar.machine.measure import measure, processor_name

QUIET = 0.2  # the part of the processors that others may use


class Kept(Facts):
    """What the file holds: facts of the machine, and of its disks by mount point."""

    key: str
    machine: Machine
    disks: dict[str, Disk] = Field(default_factory=dict)


def cache_folder() -> Path:
    """Where this user's caches go, ours within it."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "patrickstar"
    home = Path.home()
    return (
        home / "Library/Caches" if sys.platform == "darwin" else home / ".cache"
    ) / "patrickstar"


def machine_here(
    folder: Path | None,
    *,
    remeasure: bool = False,
    cache: Path | None = None,
    measured: Callable[[Path | None], Machine] = measure,
    measured_disk: Callable[[Path], Disk] = measure_disk,
) -> Machine:
    """This machine, with the disk under `folder` if one is given.

    Args:
        remeasure: whatever is kept.
        cache: the folder to keep facts in; the user's if None.
        measured, measured_disk: measure what is not kept.

    Raises:
        ConfigError: the folder cannot be used.
    """
    file = (cache or cache_folder()) / "machine.json"
    key = machine_key()
    kept = None if remeasure else _read(file, key)
    if kept is None:
        machine = measured(folder)
        disks = {} if machine.disk is None or folder is None else {_place(folder): machine.disk}
        if machine.others <= QUIET:
            _write(file, Kept(key=key, machine=machine, disks=disks))
        return machine
    disk = None
    if folder is not None:
        disk = kept.disks.get(_place(folder))
        if disk is None:
            disk = measured_disk(folder)
            known = {**kept.disks, _place(folder): disk}
            _write(file, kept.model_copy(update={"disks": known}))
    return kept.machine.model_copy(update={"disk": disk})


def machine_key() -> str:
    """What facts are measured for: another processor, other threads or another torch has others."""
    return f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _place(folder: Path) -> str:
    return mount_of(folder)[0] or "/"


def _read(file: Path, key: str) -> Kept | None:
    try:
        kept = Kept.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    return kept if kept.key == key else None


def _write(file: Path, kept: Kept) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(kept.model_dump_json(indent=1))
        os.replace(new.name, file)
    except OSError:
        return
