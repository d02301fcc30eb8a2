"""Try everything that is promised until it breaks: `python -m soak.run`, or `make soak`.

    python -m soak.run --part kills --count 5

Each part runs in a process of its own and writes `soak/results/PART.json`: how often each kind of
fault was tried, and every time that something was lost, with what is needed to repeat it. Then
docs/reliability.md is rendered from all results that are there. Exit code 1 says that something was
lost, or that a part did not come to its end.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from soak.render import render

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "soak" / "results"
# The parts, and how many times each tries by default; what is counted is the part's to say.
PARTS = {
    "budgets": 220,
    "plans": 150,
    "kills": 100,
    "readers": 100_000,
    "engines": 50,
    "paths": 1000,
    "disks": 120,
    "damage": 300,
    "accidents": 220,
    "stall": 3,
}


def commit() -> str:
    """What is tested, as git names it; with a mark if other files differ than the soak writes."""
    name = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    differs = _git("status", "--porcelain", "--", ".", ":!soak/results", ":!docs/reliability.md")
    return f"{name}-dirty" if differs else name


def _git(*command: str) -> str:
    found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def run_part(part: str, count: int, seed: int, workers: int, output: Path) -> int:
    """Run one part here and write its result; how many times something was lost."""
    import torch

    began, started = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        tallies = importlib.import_module(f"soak.{part}").soak(count, seed, Path(folder), workers)
    result: dict[str, Any] = {
        "part": part,
        "count": count,
        "seed": seed,
        "started": started,
        "seconds": round(time.monotonic() - began, 1),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tallies": [tally.to_json() for tally in tallies],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")
    for tally in tallies:
        print(f"{part}: {tally.what}: {tally.tried} tried, {len(tally.lost)} lost", flush=True)
        for why in tally.lost[:20]:
            print(f"  lost: {why}", flush=True)
    return sum(len(tally.lost) for tally in tallies)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="default: all")
    parser.add_argument("--count", type=int, help="how many times; default: as many as it says")
    parser.add_argument("--seed", type=int, default=1, help="of everything drawn at random")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--here", action="store_true", help="run the one part in this process")
    given = parser.parse_args()
    parts = given.part or list(PARTS)
    if given.here:
        (part,) = parts
        count = given.count or PARTS[part]
        return int(run_part(part, count, given.seed, given.workers, given.output) > 0)
    bad = 0
    for part in parts:
        command = [sys.executable, "-m", "soak.run", "--here", "--part", part]
        command += ["--seed", str(given.seed), "--workers", str(given.workers)]
        command += ["--output", str(given.output), "--count", str(given.count or PARTS[part])]
        # Two at a time on two cores, each with one thread.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        bad += subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    if given.output == RESULTS:
        render(RESULTS)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
