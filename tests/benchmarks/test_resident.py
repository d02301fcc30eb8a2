"""The memory of a process beside its budget."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.run import ROOT, environment


def test_the_process_stays_inside_budget_imports_and_what_is_allowed(tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    command = "-m benchmarks.resident --model gpt-tiny --host 9MiB --length 64 --steps 2"
    subprocess.run(
        [sys.executable, *command.split(), "--disk", str(tmp_path), "--json", str(answer)],
        cwd=ROOT,
        env=environment(threads=1),
        check=True,
        timeout=120,
    )
    found = json.loads(answer.read_text())
    assert found["peak"] > found["imports"] > 50e6
    assert found["above"] == found["peak"] - found["imports"] - (9 << 20) <= found["allowed"]
    assert found["moved"]["host->disk"] > 0
