"""One row in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.job import Job
from benchmarks.run import ROOT, environment


def answer_of(system: str, folder: Path, **options: Any) -> dict[str, Any]:
    job = Job(
        system, "gpt-tiny", options, length=64, steps=2, warmup=1, threads=1, disk=str(folder)
    )
    answer = folder / "answer.json"
    subprocess.run(
        [sys.executable, "-m", "benchmarks.row", job.to_json(), str(answer)],
        cwd=ROOT,
        env=environment(threads=1),
        check=True,
        timeout=300,
    )
    loaded: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    assert not list(folder.iterdir()), "what went to disk is gone"
    return loaded


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answer_of("plain", tmp_path_factory.mktemp("plain"))


def test_the_plain_loop_trains_and_is_weighed(plain: dict[str, Any]) -> None:
    assert len(plain["losses"]) == len(plain["step_s"]) == 3
    assert plain["losses"][0] != plain["losses"][2]
    assert plain["peak_rss"] > plain["import_rss"] > 50e6
    # bf16 weights and gradients, fp32 masters, gradients and moments: 20 bytes a parameter
    assert plain["peak_rss"] - plain["import_rss"] > 16 * plain["parameters"]


def test_patrickstar_under_a_budget_has_the_losses_of_the_plain_loop(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    ours = answer_of("chunked", tmp_path, memory={"host": "9MiB"}, disk=True)
    assert ours["losses"] == plain["losses"]
    assert ours["parameters"] == plain["parameters"]
    assert ours["moved"]["host->disk"] > 0
    assert ours["disk_written"][-1] > 0
