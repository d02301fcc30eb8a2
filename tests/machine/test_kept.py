"""Facts of this machine are measured once."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.errors import ConfigError
from patrickstar.machine import Disk, Machine, Processor, machine_here
from patrickstar.machine.disks import measure_disk


class Measuring:
    """Stands for the measuring, and counts it."""

    def __init__(self) -> None:
        self.machines = self.disks = 0

    def machine(self, folder: Path | None) -> Machine:
        self.machines += 1
        processor = Processor(
            name="p", flops={"float32": 1e9 * self.machines}, copy_bytes_per_s=1e9
        )
        disk = None if folder is None else self.disk(folder)
        return Machine(name="this machine", source="a test", processor=processor, disk=disk)

    def disk(self, folder: Path) -> Disk:
        self.disks += 1
        return Disk(read=1e9 * self.disks, write=1e9, folder=str(folder))

    def here(self, folder: Path | None, cache: Path, *, remeasure: bool = False) -> Machine:
        return machine_here(
            folder,
            cache=cache,
            remeasure=remeasure,
            measured=self.machine,
            measured_disk=self.disk,
        )


def test_the_second_question_is_answered_from_the_file(tmp_path: Path) -> None:
    measuring = Measuring()
    first = measuring.here(tmp_path, tmp_path / "cache")
    assert measuring.here(tmp_path, tmp_path / "cache") == first
    assert (measuring.machines, measuring.disks) == (1, 1)


def test_a_disk_that_was_not_asked_for_before_is_measured_alone(tmp_path: Path) -> None:
    measuring = Measuring()
    assert measuring.here(None, tmp_path).disk is None
    assert measuring.here(tmp_path, tmp_path).disk is not None
    assert (measuring.machines, measuring.disks) == (1, 1)


def test_on_demand_everything_is_measured_again(tmp_path: Path) -> None:
    measuring = Measuring()
    measuring.here(tmp_path, tmp_path)
    again = measuring.here(tmp_path, tmp_path, remeasure=True)
    assert again.processor.flops["float32"] == 2e9
    assert measuring.here(tmp_path, tmp_path) == again


@pytest.mark.parametrize("content", ["", "{}", '{"key": "another machine"}', "\x00"])
def test_a_file_of_another_machine_or_none_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(content)
    measuring = Measuring()
    measuring.here(None, tmp_path)
    measuring.here(None, tmp_path)
    assert measuring.machines == 1


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measuring = Measuring()
    for _ in range(2):
        measuring.here(None, tmp_path / "file")
    assert measuring.machines == 2


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    disk = measure_disk(tmp_path / "not" / "there" / "yet", nbytes=1, workers=1, rounds=1)
    assert disk.read > 0
    assert disk.write > 0
    assert disk.folder == str(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_file_is_no_folder_to_measure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no folder"):
        measure_disk(tmp_path / "file")
