"""`patrickstar.offload_activations` under DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..rank_pool import RankPool
from .offloaded_run import STEPS, under_torch

HERE = Path(__file__).parent


def check(found: dict[str, Any]) -> None:
    assert found["offloaded"] == found["plain"]
    assert len(set(found["plain"])) == STEPS
    assert found["peak"] <= 100_000 and found["moved"] > 0 and found["left"] == 0


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_losses_under_torchs_data_parallelism_stay_the_same(
    kind: str, ranks: RankPool, tmp_path: Path
) -> None:
    for found in ranks.run(under_torch, 2, kind, str(tmp_path)):
        check(found)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the extra [deepspeed]"
)
def test_losses_under_every_stage_of_zero_stay_the_same(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(HERE / "offloaded_run.py"), str(tmp_path),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    for found in json.loads(lines[0].removeprefix("FOUND")).values():
        check(found)
