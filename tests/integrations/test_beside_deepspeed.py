"""Two ranks have the losses that DeepSpeed has with two ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rank_pool import ROOT

SCRIPT = Path(__file__).with_name("beside_deepspeed.py")


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed, which the losses are compared with, is not installed",
)
def test_two_ranks_have_deepspeeds_losses_at_every_stage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(SCRIPT), str(tmp_path)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "losses.json").read_text())
    assert list(found) == ["0", "1", "2", "3"]
    for losses in found.values():
        assert len(losses["ours"]) == 10
        assert losses["ours"] == pytest.approx(losses["theirs"], rel=1e-6, abs=0)
        assert losses["ours"] == found["0"]["ours"]
        assert losses["ours"][-1] < 0.8 * losses["ours"][0], "nothing is learnt"
