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
from patrickstar.models import GPT, preset


def planned(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["plan", "--json", *map(str, arguments)])
    return result.exit_code, json.loads(result.stdout)


def test_what_fits_on_paper_fits_and_moves_as_much(tmp_path: Path) -> None:
    code, found = planned(
        "--host-memory", "12MiB", "--disk", tmp_path, "--sequence-length", 64
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
    assert a_step == pytest.approx(sum(found["moved"].values()), rel=0.25)
    assert found["state_bytes"] == engine._state.total_bytes()


def test_what_does_not_fit_names_the_smallest_that_does(tmp_path: Path) -> None:
    code, found = planned(
        "--host-memory", "1MiB", "--disk", tmp_path, "--sequence-length", 64
    )  # fmt: skip
    assert code == 1
    assert not found["fits"]
    smallest = found["tiers"]["host"]["smallest"]
    assert smallest > 1 << 20
    code, found = planned(
        "--host-memory", smallest, "--disk", tmp_path, "--sequence-length", 64
    )  # fmt: skip
    assert (code, found["fits"]) == (0, True)


def test_a_model_far_beyond_memory_is_planned_without_allocating_it(tmp_path: Path) -> None:
    code, found = planned(
        "--model", "gpt-4b", "--host-memory", "14GiB", "--disk", tmp_path, "--sequence-length", 64
    )  # fmt: skip
    assert code == 0
    assert found["state_bytes"] > 50e9
    assert found["tiers"]["host"]["peak"] <= 14 << 30
    assert not any(tmp_path.iterdir())


def test_the_step_time_comes_from_the_rates_of_a_machine(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    facts = {"gemm_flops": 1e12, "copy_bytes_per_s": 1e10, "disk": {"read": 1e9, "write": 1e9}}
    machine.write_text(json.dumps(facts))
    _, found = planned("--machine", machine, "--sequence-length", 64)
    time = found["step_time_s"]
    assert time["compute"] == pytest.approx(found["flops"] / 1e12)
    assert time["total"] == pytest.approx(time["compute"] + time["update"])


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
    result = CliRunner().invoke(app, ["plan", "--host-memory", "64MiB", "--sequence-length", "64"])
    assert result.exit_code == 0
    assert "fits" in result.stdout
    assert "smallest that works" in result.stdout
