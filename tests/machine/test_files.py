"""Machines that are given, and how wrong ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patrickstar.errors import ConfigError
from patrickstar.machine import machine_from, shipped_names


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_machine_says_where_its_numbers_come_from(name: str) -> None:
    machine = machine_from(name)
    assert "docs/plan-memory.md" in machine.source
    page = (Path(__file__).parents[2] / "docs" / "plan-memory.md").read_text()
    assert machine.accelerator is not None
    assert machine.accelerator.name.removeprefix("NVIDIA ").removeprefix("GeForce ") in page
    assert machine.memory_bytes
    assert machine.accelerator is not None
    assert machine.disk is not None


def test_there_are_the_four_that_the_page_promises() -> None:
    assert shipped_names() == ["laptop-8gb", "server-80gb", "server-8x80gb", "workstation-24gb"]


def test_the_smallest_file_needs_little(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    processor = {"name": "p", "flops": {"float32": 1e12}, "copy_bytes_per_s": 1e10}
    file.write_text(json.dumps({"name": "m", "source": "a guess", "processor": processor}))
    assert machine_from(file).computes.flops["float32"] == 1e12


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "cannot be read"),
        ('{"name": "m", "source": "s"}', "processor"),
        ('{"name": "m", "source": "s", "processor": {"flops": {"int8": 1}}}', "processor.name"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(content: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=named):
        machine_from(file)
    with pytest.raises(ConfigError, match="laptop-8gb"):
        machine_from(tmp_path / "none.json")
