"""`patrickstar train` as a person uses it: what is printed and written, and the exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import patrickstar
from patrickstar.cli import build_app
from patrickstar.cli.loop import Initialize
from patrickstar.errors import PatrickStarError

from .fake_engine import FakeEngine, FakeInitialize

FIELDS = "step loss lr grad_norm step_time_s tokens_per_s peak_bytes moved_bytes".split()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text("a starfish under a rock, " * 50)
    return file


def invoke(initialize: Initialize, *arguments: object) -> Any:
    return CliRunner(env={"NO_COLOR": "1"}).invoke(
        build_app(initialize), [str(argument) for argument in arguments]
    )


def train(initialize: FakeInitialize, text: Path, *arguments: object) -> Any:
    return invoke(
        initialize, "train", "--data", text, "--steps", 3, "--sequence-length", 16, *arguments
    )


def test_a_run_ends_with_a_summary_and_writes_a_line_of_metrics_a_step(
    tmp_path: Path, text: Path
) -> None:
    metrics = tmp_path / "new folder" / "metrics.jsonl"
    initialize = FakeInitialize(losses=[4.0, 3.0, 2.0])
    result = train(initialize, text, "--metrics", metrics)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [list(line) for line in lines] == [FIELDS] * 3
    assert [line["loss"] for line in lines] == [4.0, 3.0, 2.0]
    assert "4.0000 at the first step, 3.0000 over the last 3" in result.stdout
    assert "peak host     500 B of 1.00 MiB" in result.stdout  # reached while the model was built
    assert "host->disk 100 B" in result.stdout
    assert "MiB resident" in result.stdout or "GiB resident" in result.stdout
    assert str(metrics) in result.stdout
    assert initialize.engine is not None and initialize.engine.closed


def test_a_recorded_run_has_its_metrics_in_the_folder_and_says_so_to_the_engine(
    tmp_path: Path, text: Path
) -> None:
    initialize = FakeInitialize(losses=[4.0, 3.0, 2.0])
    result = train(initialize, text, "--record", tmp_path / "run")
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [4.0, 3.0, 2.0]
    assert initialize.engine is not None
    assert initialize.engine.config["patrickstar"]["record"] == str(tmp_path / "run")
    assert str(tmp_path / "run" / "metrics.jsonl") in result.stdout


def test_without_a_terminal_steps_are_plain_lines(text: Path) -> None:
    result = train(FakeInitialize(), text)
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert "step 3/3  loss " in steps[-1] and "host 7 B of 1.00 MiB" in steps[-1]
    assert "\x1b" not in result.stdout


def test_a_long_run_prints_some_of_its_steps(text: Path) -> None:
    result = train(FakeInitialize(), text, "--steps", 200)
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    assert len(steps) == 22 and steps[-1].startswith("step 200/200")


def test_the_seed_decides_the_weights_and_the_batches(text: Path) -> None:
    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        initialize = FakeInitialize()
        assert train(initialize, text, "--seed", seed).exit_code == 0
        engine = initialize.engine
        assert engine is not None
        return next(engine.module.parameters()).detach(), torch.stack(engine.seen)

    (weights, batches), (same_weights, same_batches) = run(1), run(1)
    other_weights, other_batches = run(2)
    assert torch.equal(weights, same_weights) and torch.equal(batches, same_batches)
    assert not torch.equal(weights, other_weights) and not torch.equal(batches, other_batches)


def test_options_reach_the_engine(text: Path, tmp_path: Path) -> None:
    initialize = FakeInitialize()
    options = "--batch-size 2 --device-memory 1GiB --host-memory 2GiB --disk".split()
    options.append(f"{tmp_path}:9GiB")
    assert train(initialize, text, "--checkpoint-activations", *options).exit_code == 0
    engine = initialize.engine
    assert engine is not None
    assert engine.config["patrickstar"]["memory"] == {
        "device": "1GiB",
        "host": "2GiB",
        "disk": {"path": str(tmp_path), "size": "9GiB"},
    }
    assert engine.seen[0].shape == (2, 16)
    assert engine.module.config.checkpointing == "non-reentrant"


def test_a_diverged_run_fails_names_the_step_and_still_sums_up(tmp_path: Path, text: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    initialize = FakeInitialize(losses=[4.0, float("nan")])
    result = train(initialize, text, "--metrics", metrics)
    assert result.exit_code == 1
    assert "the loss is nan at step 2" in result.stderr
    assert "1 step in" in result.stdout and len(metrics.read_text().splitlines()) == 1
    assert initialize.engine is not None and initialize.engine.closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is full")
def test_a_metrics_file_on_a_full_disk_fails_the_run_and_names_the_step(text: Path) -> None:
    initialize = FakeInitialize()
    result = train(initialize, text, "--metrics", "/dev/full")
    assert result.exit_code == 1
    assert "'/dev/full' cannot be written any more at step 1 (No space left" in result.stderr
    assert initialize.engine is not None and initialize.engine.closed


def test_every_step_is_in_the_metrics_file_before_the_next_begins(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines_seen: list[int] = []

    def reset_peak(engine: FakeEngine) -> None:
        lines_seen.append(len(metrics.read_text().splitlines()))

    monkeypatch.setattr(FakeEngine, "reset_peak", reset_peak)
    assert train(FakeInitialize(), text, "--metrics", metrics).exit_code == 0
    assert lines_seen == [0, 1, 2]


def test_an_error_is_one_paragraph_without_a_traceback(text: Path) -> None:
    error = PatrickStarError("the store is gone")
    result = train(FakeInitialize(error=error), text)
    assert result.exit_code == 1
    assert result.stderr == "patrickstar: the store is gone\n"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_budget_that_is_refused_while_building_names_what_the_whole_run_works_with(
    text: Path, tmp_path: Path, precision: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"bf16": {"enabled": precision == "bf16"}}))
    run = ["train", "--data", text, "--steps", 2, "--sequence-length", 64, "--config", config]
    refused = invoke(patrickstar.initialize_engine, *run, "--host-memory", 8)
    assert refused.exit_code == 1 and "did you mean 8GiB?" in refused.stderr
    named = re.findall(r"--host-memory (\S+iB)", refused.stderr)
    assert len(named) == 1 and len(re.findall(r"\d+\.\d\d ?[KMG]iB", refused.stderr)) == 1
    assert invoke(patrickstar.initialize_engine, *run, "--host-memory", named[0]).exit_code == 0


def test_a_budget_that_is_refused_while_training_is_told_once_and_with_its_option(
    text: Path,
) -> None:
    # Enough for the model and its state, not for the activations.
    run = ["train", "--data", text, "--steps", 2, "--batch-size", 8, "--host-memory", "13.5MiB"]
    refused = invoke(patrickstar.initialize_engine, *run)
    assert refused.exit_code == 1
    assert refused.stderr.count("too small") == refused.stderr.count("smallest that works") == 1
    assert "cannot leave" not in refused.stderr
    assert "--host-memory (patrickstar.memory.host)" in refused.stderr


def test_debug_lets_the_traceback_out(text: Path) -> None:
    result = train(FakeInitialize(error=PatrickStarError("why")), text, "--debug")
    assert isinstance(result.exception, PatrickStarError)


def test_an_interrupted_run_says_so(text: Path) -> None:
    result = train(FakeInitialize(error=KeyboardInterrupt()), text)
    assert (result.exit_code, result.stderr) == (130, "patrickstar: interrupted\n")


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--model", "gpt-tinny"], 2, "did you mean 'gpt-tiny'"),
        (["--model", "gpt-tiny", "--hf-config", "x.json"], 2, "exclude each other"),
        (["--config", "absent.json"], 2, "absent.json"),
        (["--sequence-length", "257"], 2, "longer than the 256 positions of gpt-tiny"),
        (["--steps", "0"], 2, "--steps"),
        (["--seed", str(2**64)], 2, "--seed"),
        (["--disk", __file__], 2, "is, or lies under, a file and not a folder"),
        (["--disk", "/dev/null/spool"], 2, "--disk '/dev/null/spool' is, or"),
        (["--host-memory", "8Mo"], 2, "--host-memory: '8Mo' has the unknown unit"),
        (["--metrics", "/dev/null/metrics"], 2, "cannot be written"),
        (["--data", "nowhere"], 2, "--data: the data path 'nowhere' does not exist"),
    ],
)
def test_what_cannot_be_is_refused_with_its_code(
    text: Path, arguments: list[str], code: int, message: str
) -> None:
    result = train(FakeInitialize(), text, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["plan"]])
def test_help_fits_a_screen_and_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(build_app(FakeInitialize()), [*command, "--help"])
    lines = result.stdout.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 80
    assert any(line.startswith("    patrickstar ") for line in lines)


def test_help_names_the_defaults() -> None:
    result = CliRunner().invoke(build_app(FakeInitialize()), ["train", "--help"])
    lines = result.stdout.splitlines()
    for default in ("[gpt-tiny]", "default: 100", "3e-4", "Python's standard library"):
        assert default in " ".join(lines)


def test_the_version_is_printed() -> None:
    result = invoke(FakeInitialize(), "--version")
    assert result.exit_code == 0 and result.stdout.startswith("patrickstar ")
