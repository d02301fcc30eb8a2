"""How far a plan is from the run: verdict, peak memory and step time of one case.

    python -m benchmarks.prediction --case gpt-25m-disk --disk FOLDER [--json FILE]

The plan is asked in a process of its own, which measures this machine and its operators anew, and
the run is made in another one right after it. The peak of a tier is what its books say after the
last step, from the first moment on; that of a disk is of the steps after the warm-up, which all
follow the plan that was predicted. The step is the median of those.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.job import Job

RECOMPUTED = {"checkpointing": "non-reentrant"}


def _case(
    model: str,
    *,
    device: str | None = None,
    host: str | None = None,
    disk: bool = False,
    precision: str = "bf16",
    length: int = 512,
    sequences: int = 1,
    changes: dict[str, Any] | None = None,
) -> Job:
    given = {"device": device, "host": host}
    memory = {name: size for name, size in given.items() if size is not None}
    options = {"memory": memory, "disk": disk, "precision": precision}
    return Job(
        "chunked", model, options, changes or {}, sequences=sequences, length=length,
        steps=6, warmup=4,
    )  # fmt: skip


# In memory and beyond it, every precision, with and without recomputation, two tiers and three,
# long and short sequences; the last of each model has a budget that is too small.
CASES = {
    "tiny-memory": _case("gpt-tiny", length=256, sequences=4),
    "tiny-disk": _case("gpt-tiny", host="10MiB", disk=True, length=256),
    "25m-memory": _case("gpt-25m"),
    "25m-memory-fp32": _case("gpt-25m", precision="fp32"),
    "25m-memory-fp16": _case("gpt-25m", precision="fp16", length=128),
    "25m-recomputed": _case("gpt-25m", sequences=4, changes=RECOMPUTED),
    "25m-disk": _case("gpt-25m", host="256MiB", disk=True),
    "25m-disk-short": _case("gpt-25m", host="160MiB", disk=True, length=128),
    "25m-disk-fp32": _case("gpt-25m", host="256MiB", disk=True, precision="fp32"),
    "25m-device": _case("gpt-25m", device="192MiB", host="512MiB"),
    "25m-device-disk": _case("gpt-25m", device="128MiB", host="160MiB", disk=True),
    "25m-refused": _case("gpt-25m", host="72MiB", disk=True),
    "300m-memory": _case("gpt-300m"),
    "300m-disk": _case("gpt-300m", host="2GiB", disk=True),
    "300m-third": _case("gpt-300m", host="1.32GiB", disk=True),
    "300m-recomputed": _case("gpt-300m", host="1GiB", disk=True, changes=RECOMPUTED),
    "300m-refused": _case("gpt-300m", host="4GiB"),
}


def planned(job: Job, machine: str | None = None) -> dict[str, Any]:
    """What `patrickstar.plan` says of the job on `machine`; this one by default, measured now."""
    import torch

    import patrickstar
    from benchmarks.systems.chunked import config_of
    from patrickstar.models import GPT, preset

    config = dataclasses.replace(preset(job.model), **job.changes)
    tokens = torch.zeros(job.sequences, job.length, dtype=torch.long, device="meta")
    found = patrickstar.plan(
        lambda: GPT(config),
        config_of(job),
        tokens,
        tokens,
        machine=machine,
        remeasure=True,
        what_if=False,
    )
    answer = found.as_dict()
    for long in ("usage", "moments"):
        answer.pop(long)
    return answer


def run(job: Job, folder: Path) -> dict[str, Any]:
    """What the run is like, or with which message it was refused."""
    answer = folder / "answer.json"
    command = [sys.executable, "-m", "benchmarks.row", job.to_json(), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return {"refused": None, **json.loads(answer.read_text())}
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    if "BudgetError" not in last and "SpoolError" not in last:
        raise RuntimeError(done.stderr)
    return {"refused": last}


def compare(name: str, disk: str, threads: int) -> dict[str, Any]:
    """One case, planned and run."""
    job = dataclasses.replace(CASES[name], disk=disk, threads=threads)
    with tempfile.TemporaryDirectory(prefix="prediction-", dir=disk) as place:
        folder = Path(place)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
        command = [sys.executable, "-m", "benchmarks.prediction", "--plan", job.to_json()]
        plan = folder / "plan.json"
        subprocess.run([*command, "--json", str(plan)], env=environment, check=True)
        found = {"plan": json.loads(plan.read_text()), "run": run(job, folder)}
    return {"case": name, "job": json.loads(job.to_json()), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--plan", metavar="JOB", help="only ask the plan of this job")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.plan:
        import torch

        job = Job.from_json(given.plan)
        torch.set_num_threads(job.threads)
        answer = planned(job)
    elif given.case:
        answer = compare(given.case, given.disk, given.threads)
    else:
        parser.error("give --case or --plan")
    text = json.dumps(answer, indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
