"""`ChunkedAdamW` inside runs whose data parallelism is DeepSpeed's, DDP's or FSDP2's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def losses(kind: str, optimizer: str, ranks: int, folder: Path) -> list[float]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), str(HERE / "foreign_run.py"), kind, optimizer, str(folder),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in done.stdout.splitlines() if "LOSSES" in line]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    found: list[float] = json.loads(lines[0].split("LOSSES")[1])
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_it_replaces_adamw_under_torchs_data_parallelism(kind: str, tmp_path: Path) -> None:
    assert losses(kind, "chunked", 2, tmp_path) == losses(kind, "torch", 2, tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the extra [deepspeed]"
)
@pytest.mark.parametrize("stage", [1, 2])
def test_it_replaces_offload_under_deepspeeds_zero(stage: int, tmp_path: Path) -> None:
    kind = f"deepspeed-{stage}"
    assert losses(kind, "chunked", 2, tmp_path) == losses(kind, "torch", 2, tmp_path)
