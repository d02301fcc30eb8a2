"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.machine.limits import machine_bytes, memory_limit


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
