"""The README is true: its code runs, its commands parse, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patrickstar.cli import app, build_app

from .cli.fake_engine import FakeInitialize

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line
    for language, code in BLOCKS
    if language == "bash"
    for line in code.replace("\\\n", " ").splitlines()
]


def execute(script: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_readme_shows_the_library_and_the_memory_manager() -> None:
    assert any("initialize_engine" in code for code in PYTHON)
    assert any("ChunkManager" in code for code in PYTHON)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_a_python_block_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    result = execute(script, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_example_trains(tmp_path: Path) -> None:
    result = execute(ROOT / "examples" / "train_gpt.py", tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert named and named <= targets


def test_every_command_line_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "my-text").write_text("words " * 1000)
    lines = [shlex.split(line, comments=True) for line in COMMANDS]
    lines = [words for words in lines if words[:2] == ["patrickstar", "train"]]
    assert len(lines) >= 3
    for words in lines:
        if "--hf-config" in words:
            continue  # needs somebody's file; tests/cli/test_model_choice.py covers it
        fake = build_app(FakeInitialize(losses=[1.0] * 100))
        result = CliRunner().invoke(fake, [*words[1:], "--model", "gpt-tiny", "--steps", "1"])
        assert result.exit_code == 0, f"{words}: {result.output}"


def test_a_newcomer_gets_from_training_to_a_plan_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    monkeypatch.chdir(tmp_path)
    theirs = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    short = {"train": ["--steps", "3", "--sequence-length", "32"], "plan": [], "report": []}
    named = {"train": "--record", "plan": "--hf-config", "report": ""}
    for command, options in short.items():
        lines = [line for line in COMMANDS if line.startswith(f"patrickstar {command}")]
        words = shlex.split(next(line for line in lines if named[command] in line), comments=True)
        result = CliRunner().invoke(app, [*words[1:], *options])
        assert result.exit_code == 0, f"{words}: {result.output}"
    (page,) = tmp_path.rglob("report.html")
    assert "Plan against reality" in page.read_text()


def test_every_link_into_the_repository_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
