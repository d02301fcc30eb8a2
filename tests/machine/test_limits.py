"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.machine.limits import (
    available_bytes,
    machine_bytes,
    memory_limit,
    usable_processors,
)


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    found = memory_limit(tmp_path, tmp_path / "none")
    assert (found.bytes, found.by) == (machine_bytes(), "machine")


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/memory.max"),
        ("0::/a/b", "memory.max"),
        ("4:cpu,memory:/a/b", "memory/a/b/memory.limit_in_bytes"),
    ],
)
def test_the_tightest_group_above_counts(line: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text(line + "\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("1048576\n")
    found = memory_limit(tmp_path, tmp_path / "own")
    assert (found.bytes, found.by) == (1 << 20, str(tmp_path / file))


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/a/b", {"a/cpu.max": "50000 100000"}),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "cpu.max": "50000 100000"}),
        (
            "4:cpu,cpuacct:/a/b",
            {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_a_group_may_give_less_than_the_processors_there_are(
    line: str, files: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "own").write_text(line + "\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert usable_processors(tmp_path, tmp_path / "own") == 0.5


def test_a_quota_of_minus_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:cpu:/\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_processors(tmp_path, tmp_path / "own") >= 1
    assert usable_processors(tmp_path, tmp_path / "none") >= 1


def test_available_memory_is_what_the_system_says(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2048 kB\nMemAvailable:  1024 kB\n")
    assert available_bytes(tmp_path / "meminfo") == 1 << 20
    assert available_bytes(tmp_path / "none") is None
