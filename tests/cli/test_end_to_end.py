"""The command line with the real engine; once in a process of its own, as a person starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from patrickstar.cli import app
from patrickstar.memory.sizes import parse_bytes
from patrickstar.models import GPT, preset

ROOT = Path(__file__).parents[2]
SMALL = "--model gpt-tiny --steps 6 --sequence-length 64".split()


def state_bytes(model: str) -> int:
    """bf16 parameter and gradient, fp32 master and two moments: 16 bytes a parameter."""
    with torch.device("meta"):
        return 16 * sum(p.numel() for p in GPT(preset(model)).parameters())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def metrics_of(file: Path, *arguments: object) -> list[dict[str, Any]]:
    result = run(*SMALL, "--metrics", file, *arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A run without a budget, started by a person."""
    file = tmp_path_factory.mktemp("free") / "metrics.jsonl"
    command = [sys.executable, "-m", "patrickstar", "train", *SMALL, "--metrics", str(file)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


def highest(lines: list[dict[str, Any]]) -> int:
    return max(line["peak_bytes"]["host"] for line in lines)


def test_a_budget_below_the_state_is_kept_and_changes_no_loss(
    free: list[dict[str, Any]], tmp_path: Path
) -> None:
    budget = 8 << 20
    assert budget < state_bytes("gpt-tiny")
    spool = tmp_path / "spool"
    tight = metrics_of(tmp_path / "tight.jsonl", "--host-memory", budget, "--disk", spool)
    assert [line["loss"] for line in tight] == [line["loss"] for line in free]
    assert [line["grad_norm"] for line in tight] == [line["grad_norm"] for line in free]
    assert highest(tight) <= budget
    assert all(line["moved_bytes"]["disk->host"] > 0 for line in tight[1:])
    assert "disk" not in free[0]["peak_bytes"]
    assert list(spool.iterdir()) == []


def test_a_device_budget_makes_a_third_tier_with_the_same_losses(
    free: list[dict[str, Any]], tmp_path: Path
) -> None:
    three = metrics_of(
        tmp_path / "three.jsonl",
        *("--device-memory", "6MiB", "--host-memory", "8MiB", "--disk", tmp_path / "spool"),
    )
    assert [line["loss"] for line in three] == [line["loss"] for line in free]
    assert set(three[0]["peak_bytes"]) == {"device", "host", "disk"}
    assert three[-1]["moved_bytes"]["host->device"] > 0


def test_checkpointing_activations_needs_less_memory_for_the_same_loss(tmp_path: Path) -> None:
    many = ("--batch-size", 16, "--steps", 2)
    # Enough tokens for activations to outweigh the model's state.
    kept = metrics_of(tmp_path / "kept.jsonl", *many)
    recomputed = metrics_of(tmp_path / "recomputed.jsonl", *many, "--checkpoint-activations")
    assert [line["loss"] for line in recomputed] == [line["loss"] for line in kept]
    assert highest(recomputed) < 0.8 * highest(kept)


def test_a_budget_that_cannot_work_is_refused_with_one_that_does(tmp_path: Path) -> None:
    disk = ("--disk", tmp_path / "spool")
    refused = run(*SMALL, "--host-memory", "100KiB", *disk)
    assert refused.exit_code == 1 and "Traceback" not in refused.stderr
    found = re.search(r"--host-memory (\S+)", refused.stderr)
    assert found, refused.stderr
    for _ in range(5):  # what a first answer leaves out, a later one adds
        again = run(*SMALL, "--host-memory", found[1], *disk)
        if again.exit_code == 0:
            return
        found = re.search(r"--host-memory (\S+)", again.stderr)
        assert found, again.stderr
    pytest.fail(f"no budget that was named works: {again.stderr}")


def test_a_misspelt_key_of_the_config_is_a_usage_error(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"patrickstar": {"memory": {"hots": "1GiB"}}}))
    result = run(*SMALL, "--config", config)
    assert result.exit_code == 2
    assert "hots" in result.stderr and "host" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_hugging_face_config_trains(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 256}
        )
    )
    result = run("--hf-config", config, "--steps", 3, "--sequence-length", 32)
    assert result.exit_code == 0, result.stderr
    assert "3 steps in" in result.stdout


def test_make_train_gives_the_host_less_than_the_models_state() -> None:
    recipe = (ROOT / "Makefile").read_text()
    model, host = re.search(r"--model (\S+).*?--host-memory (\S+)", recipe, re.DOTALL).groups()
    assert parse_bytes(host) < state_bytes(model) / 2


def test_the_monitors_of_the_config_get_what_the_metrics_file_has(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    config.write_text(json.dumps({"train_batch_size": 2, "csv_monitor": monitor}))
    lines = metrics_of(tmp_path / "metrics.jsonl", "--config", config, "--steps", 2)
    for name, of in {
        "Train_Samples_train_loss": lambda line: line["loss"],
        "Train_Samples_grad_norm": lambda line: line["grad_norm"],
        "Train_Samples_tokens_per_s": lambda line: line["tokens_per_s"],
        "Memory_peak_bytes_host": lambda line: line["peak_bytes"]["host"],
    }.items():
        rows = (tmp_path / "run" / f"{name}.csv").read_text().splitlines()[1:]
        written = [(int(step), float(value)) for step, value in (row.split(",") for row in rows)]
        assert written == [(2 * line["step"], of(line)) for line in lines], name
