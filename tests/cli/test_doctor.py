"""`patrickstar doctor` as a person and a script use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import patrickstar
from patrickstar.cli.doctor import doctor_command
from patrickstar.cli.loop import Initialize
from patrickstar.errors import ConfigError
from patrickstar.machine import Disk, Machine, Processor

from .fake_engine import FakeInitialize


def measured() -> Machine:
    rates = {"float32": 1e12, "bfloat16": 1e9}
    slow = Processor(name="old", flops=rates, copy_bytes_per_s=1e10, threads=1)
    return Machine(name="this machine", source="a test", processor=slow)


def fast_disk(folder: Path) -> Disk:
    return Disk(read=3e9, write=3e9, folder=str(folder), kind="ext4")


def invoke(initialize: Initialize, *arguments: object, disk: Any = fast_disk) -> Any:
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(doctor_command(initialize, measured, disk))
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_machine_that_works_has_trained_a_model_and_says_what_is_slow(tmp_path: Path) -> None:
    result = invoke(patrickstar.initialize_engine, "--disk", tmp_path)
    assert result.exit_code == 0, result.output
    assert "3 steps of gpt-tiny" in result.stdout
    assert "Training will work. Slower than it could be: processors." in result.stdout
    assert "do:  train in fp32" in result.stdout
    lines = [line for line in result.stdout.splitlines()[:-1] if str(tmp_path.parent) not in line]
    assert max(map(len, lines)) <= 80
    assert not any(tmp_path.iterdir())


def test_a_run_that_fails_is_exit_code_1_and_says_with_what(tmp_path: Path) -> None:
    broken = FakeInitialize(error=OSError("no pages for you"))
    result = invoke(broken, "--disk", tmp_path)
    assert result.exit_code == 1
    assert "OSError: no pages for you" in result.stdout
    assert "Training will fail: training." in result.stdout


def test_a_disk_that_cannot_be_used_fails(tmp_path: Path) -> None:
    def full(folder: Path) -> Disk:
        raise ConfigError("it has less than 256 MiB free")

    result = invoke(FakeInitialize(), "--disk", tmp_path, "--json", disk=full)
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["disk"]["state"] == "fails"
    assert "256 MiB" in checks["disk"]["why"]


def test_a_script_gets_checks_and_rates(tmp_path: Path) -> None:
    result = invoke(FakeInitialize(), "--disk", tmp_path, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["works"]) == (0, True)
    assert found["machine"]["processor"]["flops"]["float32"] == 1e12
    assert all(check["state"] in ("fine", "missing", "slow") for check in found["checks"])
    assert all(check["why"] for check in found["checks"] if check["state"] != "fine")


def test_a_file_is_no_folder_to_spill_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = invoke(FakeInitialize(), "--disk", tmp_path / "file")
    assert result.exit_code == 2
    assert "no folder" in result.stderr


def test_a_cache_that_cannot_be_written_makes_plans_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = invoke(FakeInitialize(), "--disk", tmp_path)
    assert result.exit_code == 0
    assert "slow    cache" in result.stdout
