"""DeepSpeed's scripts, unmodified, give the same numbers under both imports."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples" / "deepspeed").glob("*.py"))
NEEDS = {"bert_finetune": "transformers", "llama_client_scheduler": "transformers", "lora": "peft"}
# In 16 bits DeepSpeed makes its master weights from weights that are rounded already.
IN_16_BITS = {
    "gpt_pretrain",
    "llama_client_scheduler",
    "lora",
}


def run_all(under: str, folder: Path) -> dict[str, Any]:
    """What each script printed, by its name; one process for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    output = folder / "printed.json"
    scripts = [str(s) for s in SCRIPTS if importlib.util.find_spec(NEEDS.get(s.stem, "torch"))]
    runner = str(Path(__file__).with_name("run_deepspeed_examples.py"))
    ended = subprocess.run(
        [sys.executable, runner, under, str(output), *scripts],
        cwd=folder,
        env=os.environ
        | alone
        | {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(output.read_text(encoding="utf-8"))
    return {Path(script).stem: found for script, found in printed.items()}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_all("patrickstar", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed, which the numbers are compared with, is not installed")
    return run_all("deepspeed", tmp_path_factory.mktemp("theirs"))


def test_there_are_at_least_ten_scripts() -> None:
    assert len(SCRIPTS) >= 10


def rows(printed: dict[str, Any], script: str) -> list[Any]:
    if script not in printed:
        pytest.skip(f"{NEEDS[script]} is not installed")
    assert "error" not in printed[script], printed[script]["error"]
    return list(printed[script]["rows"])


@pytest.mark.parametrize("script", [s.stem for s in SCRIPTS])
def test_a_script_runs_under_patrickstar(script: str, ours: dict[str, Any]) -> None:
    losses = [value for _, name, value in rows(ours, script) if name == "loss"]
    assert len(losses) >= 4 and all(0 < value < 10 for value in losses)


@pytest.mark.parametrize("script", [s.stem for s in SCRIPTS])
def test_a_script_prints_what_it_prints_under_deepspeed(
    script: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    expected, found = rows(theirs, script), rows(ours, script)
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    tolerance = 2e-3 if script in IN_16_BITS else 1e-6
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=tolerance)
