"""Tests of the command line measure no machine; they find facts kept in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.machine import Disk, Machine, Processor
from patrickstar.machine.disks import mount_of
from patrickstar.machine.kept import Kept, machine_key


@pytest.fixture(autouse=True)
def known_machine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine, as if it had been measured."""
    cache = tmp_path_factory.mktemp("cache")
    processor = Processor(
        name="a test's", flops={"float32": 1e11, "bfloat16": 1e12}, copy_bytes_per_s=1e10
    )
    disk = Disk(read=1e9, write=1e9)
    kept = Kept(
        key=machine_key(),
        machine=Machine(name="this machine", source="a test", processor=processor),
        disks={mount_of(Path(tmp_path_factory.getbasetemp()))[0] or "/": disk},
    )
    (cache / "patrickstar").mkdir()
    (cache / "patrickstar" / "machine.json").write_text(kept.model_dump_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
