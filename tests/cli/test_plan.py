"""`patrickstar plan`, held against what a run really does."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import patrickstar
from patrickstar.cli import app
from patrickstar.models import GPT, GPTConfig, preset


def planned(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", "--json", *map(str, arguments)])
    return result.exit_code, json.loads(result.stdout)


def test_what_fits_on_paper_fits_and_moves_as_much(tmp_path: Path) -> None:
    code, found = planned(
        "--host-memory", "12MiB", "--disk", tmp_path, "--sequence-length", 64, "--quick",
        "--machine", machine_in(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert found["fits"]
    torch.manual_seed(0)
    engine, optimizer = patrickstar.initialize_engine(
        lambda: GPT(preset("gpt-tiny")),
        {
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "patrickstar": {"memory": {"host": "12MiB", "disk": str(tmp_path)}},
        },
    )
    tokens = torch.randint(0, 256, (1, 64))
    moved: list[int] = []
    for _ in range(8):
        engine.backward(engine(tokens, tokens))
        optimizer.step()
        moved.append(sum(engine.memory_report().moved.values()))
    engine.close()
    # Steps differ: what should have left in one may have to wait for the disk until the next.
    a_step = statistics.median(b - a for a, b in itertools.pairwise(moved[1:]))
    assert a_step == pytest.approx(sum(found["moved"].values()), rel=0.15)
    assert found["state_bytes"] == engine._state.total_bytes()


def test_a_budget_that_lost_its_unit_is_asked_about(tmp_path: Path) -> None:
    shown = CliRunner().invoke(
        app, ["plan", "--host-memory", "4", "--quick", "--machine", str(machine_in(tmp_path))]
    )
    assert shown.exit_code == 1
    assert "4 B (did you mean 4GiB?)" in shown.stdout


def test_what_does_not_fit_names_the_smallest_that_does(tmp_path: Path) -> None:
    code, found = planned(
        "--host-memory", "1MiB", "--disk", tmp_path, "--sequence-length", 64, "--quick",
        "--machine", machine_in(tmp_path),
    )  # fmt: skip
    assert code == 1
    assert not found["fits"]
    smallest = found["tiers"]["host"]["smallest"]
    assert smallest > 1 << 20
    code, found = planned(
        "--host-memory", smallest, "--disk", tmp_path, "--sequence-length", 64, "--quick",
        "--machine", machine_in(tmp_path),
    )  # fmt: skip
    assert (code, found["fits"]) == (0, True)


def machine_in(folder: Path, disk: object = None, **processor: object) -> Path:
    """A machine's file, so that nothing is measured here."""
    rates = {"name": "CPU", "flops": {"bfloat16": 1e11}, "copy_bytes_per_s": 1e10} | processor
    facts = {"name": "m", "source": "a guess", "processor": rates, "disk": disk}
    file = folder / "machine.json"
    file.write_text(json.dumps(facts))
    return file


def wide() -> GPT:
    """A model of 0.8 billion parameters in four layers."""
    return GPT(GPTConfig(layers=4, width=4096, heads=32, positions=64))


def test_a_model_far_beyond_memory_is_planned_without_allocating_it(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    code, found = planned(
        "--provider", f"{__name__}:wide", "--host-memory", "4GiB", "--disk", spool,
        "--sequence-length", 64, "--quick", "--machine", machine_in(tmp_path),
    )  # fmt: skip
    assert code == 0
    assert found["state_bytes"] > 12e9
    assert found["tiers"]["host"]["peak"] <= 4 << 30
    assert not spool.exists()


def test_the_step_time_comes_from_the_rates_of_a_machine(tmp_path: Path) -> None:
    machine = machine_in(tmp_path, flops={"bfloat16": 1e6}, copy_bytes_per_s=1e15)
    _, found = planned("--machine", machine, "--sequence-length", 64, "--quick")
    step = found["step"]
    assert step["compute"] == pytest.approx(found["flops"] / 1e6, rel=0.01)
    assert step["total"] == pytest.approx(step["compute"] + step["update"])
    assert (step["bottleneck"], step["measured"]) == ("compute", False)


def test_a_slow_disk_is_named_as_what_is_waited_for(tmp_path: Path) -> None:
    fast = {"flops": {"bfloat16": 1e15}, "copy_bytes_per_s": 1e15}
    machine = machine_in(tmp_path, disk={"read": 1e6, "write": 1e6}, **fast)
    _, found = planned(
        "--machine", machine, "--sequence-length", 64, "--host-memory", "8MiB", "--disk", tmp_path
    )  # fmt: skip
    step, moved = found["step"], sum(found["moved"].values())
    assert step["bottleneck"] == "disk"
    assert step["total"] == pytest.approx(moved / 1e6, rel=0.05)
    faster = {change["change"]: change for change in found["what_if"]}["a disk twice as fast"]
    assert faster["speed"] == pytest.approx(2, rel=0.05)


def test_on_another_machine_open_budgets_are_its_memories() -> None:
    _, found = planned(
        "--machine", "laptop-8gb", "--sequence-length", 64, "--world-size", 2048, "--quick"
    )
    assert found["tiers"]["device"]["budget"] == pytest.approx(0.9 * (8 << 30), rel=1e-6)
    assert [stage["stage"] for stage in found["parallel"]["stages"]] == [0, 1, 2, 3]


def test_contradicting_models_and_bad_files_are_usage_errors(tmp_path: Path) -> None:
    runner = CliRunner()
    both = runner.invoke(app, ["plan", "--model", "gpt-tiny", "--provider", "a:b"])
    missing = runner.invoke(app, ["plan", "--machine", str(tmp_path / "none.json")])
    provider = runner.invoke(app, ["plan", "--provider", "no.such:thing"])
    assert [r.exit_code for r in (both, missing, provider)] == [2, 2, 2]
    assert "exclude each other" in both.stderr
    assert "none.json" in missing.stderr
    assert "no.such:thing" in provider.stderr


def test_people_get_a_table(tmp_path: Path) -> None:
    narrow = CliRunner(env={"COLUMNS": "62"})
    result = narrow.invoke(app, ["plan", "--host-memory", "64MiB", "--sequence-length", "64"])
    assert result.exit_code == 0
    assert "M parameters: fits\n" in result.stdout
    assert "A tier needs its smallest that works" in result.stdout
    assert "bottleneck: compute" in result.stdout
    assert "a batch twice" in result.stdout


def test_help_fits_a_screen() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"], terminal_width=80).stdout.splitlines()
    assert len(shown) <= 32
    assert max(map(len, shown)) <= 80
