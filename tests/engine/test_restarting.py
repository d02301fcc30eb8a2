"""A rank that is killed in the middle of a step costs the steps since the last checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from tests.engine import elastic_run
from tests.rank_pool import ROOT, RankPool


def without_a_kill(rank: int, size: int, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no checkpoint yet
        elastic_run.train(folder, kill=False)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_torchrun_restarts_a_run_whose_rank_was_killed_and_its_losses_are_those_without(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    ranks.run(without_a_kill, 2, whole)
    expected = {line["step"]: line["loss"] for line in lines(whole) if "step" in line}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", elastic_run.__file__, str(killed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "exitcode: -9" in run.stderr, "nobody was killed"
    told = lines(killed)
    assert [line["begins"] for line in told if "begins" in line] == [0, 4]
    found = [(line["step"], line["loss"]) for line in told if "step" in line]
    assert [step for step, _ in found] == [0, 1, 2, 3, 4, 5]
    assert all(loss == expected[step] for step, loss in found)
