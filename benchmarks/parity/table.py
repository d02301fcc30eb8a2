"""The table of parity: `python -m benchmarks.parity.table --disk FOLDER [--json FILE]`.

Every row trains every model in both precisions for 200 steps, in a process of its own, and is
compared with DeepSpeed's stage 1 with torch's AdamW step by step. fp16 is compared apart. A second,
short run of a larger model shows the memory of what does the same work inside DeepSpeed's ZeRO-2.

Differences and memory do not depend on what else the machine does, so nothing here is timed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parity.task import MODELS, PRECISIONS, STEPS
from benchmarks.tables import AIO

REFERENCE = "deepspeed-1"
LARGER, LARGER_STEPS = "gpt-25m", 4
_CPU = {"offload_optimizer": {"device": "cpu"}}
_NVME = {"device": "nvme", "pin_memory": False, "buffer_count": 12}


@dataclass(frozen=True)
class Row:
    key: str
    name: str
    system: str
    options: dict[str, Any] = field(default_factory=dict)


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, **more}}


ROWS = (
    Row("plain", "Plain PyTorch", "plain"),
    *(Row(f"deepspeed-{n}", f"DeepSpeed stage {n}", "deepspeed", zero(n)) for n in range(4)),
    Row("deepspeed-2-cpu", "DeepSpeed stage 2, CPU offload", "deepspeed", zero(2, **_CPU)),
    Row(
        "deepspeed-3-cpu",
        "DeepSpeed stage 3, CPU offload",
        "deepspeed",
        zero(3, **_CPU, offload_param={"device": "cpu"}),
    ),
    Row(
        "deepspeed-3-nvme",
        "DeepSpeed stage 3, NVMe offload",
        "deepspeed",
        {**zero(3, offload_optimizer=_NVME, sub_group_size=40_000), "aio": AIO},
    ),
    Row("patrickstar", "PatrickStar, everything in memory", "patrickstar"),
    Row(
        "patrickstar-35",
        "PatrickStar, host 3.5 MiB + disk",
        "patrickstar",
        {"memory": {"host": "3.5MiB"}},
    ),
    Row(
        "patrickstar-33",
        "PatrickStar, host 3.3 MiB + disk",
        "patrickstar",
        {"memory": {"host": "3380KiB"}},
    ),
    Row(
        "chunked",
        "DeepSpeed stage 2 with ChunkedAdamW, 256 KiB + disk",
        "deepspeed",
        {**zero(2), "memory": {"host": "256KiB"}},
    ),
)
MEMORY = (
    Row("deepspeed-2", "DeepSpeed stage 2", "deepspeed", zero(2)),
    Row("deepspeed-2-cpu", "DeepSpeed stage 2, CPU offload", "deepspeed", zero(2, **_CPU)),
    Row(
        "chunked",
        "DeepSpeed stage 2 with ChunkedAdamW, 32 MiB + disk",
        "deepspeed",
        {**zero(2), "memory": {"host": "32MiB"}},
    ),
)


def run(row: Row, runs: list[list[str]], steps: int, given: argparse.Namespace) -> dict[str, Any]:
    """What the process of `row` answers, or answered before; without an answer, why."""
    python = given.deepspeed_python if row.system in ("deepspeed", "half-plain") else sys.executable
    job = {"system": row.system, "options": row.options, "disk": given.disk, "steps": steps}
    text = json.dumps({**job, "runs": runs})
    answer = answers_folder(given) / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    if not answer.exists():
        answer.parent.mkdir(exist_ok=True)
        command = [python, "-m", "benchmarks.parity.process", text, str(answer)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=1800, env=environment
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)[:300]}
        if not answer.exists():
            lines = done.stderr.strip().splitlines()
            return {"error": lines[-1][:300] if lines else f"ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def answers_folder(given: argparse.Namespace) -> Path:
    """Where answers wait until all are there, so that an interrupted table goes on."""
    return Path(given.disk) / "parity-answers"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def difference(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """The largest relative difference of a step, and the mean one of the last quarter, signed."""
    relative = [(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    last = relative[-max(1, len(relative) // 4) :]
    return {"largest": max(map(abs, relative)), "drift": sum(last) / len(last)}


def compared(row: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """For every model and precision how far `row` is from `reference`, or why that is unknown."""
    made: dict[str, Any] = {}
    for key in (f"{model} {precision}" for precision in PRECISIONS for model in MODELS):
        both = row.get(key, row.get("error")), reference.get(key, reference.get("error"))
        wrong = next((part for part in both if not isinstance(part, dict)), None)
        if isinstance(both[0], dict) and isinstance(both[1], dict):
            made[key] = {
                **difference(both[0]["losses"], both[1]["losses"]),
                "moved": both[0]["moved"],
                "last_loss": both[0]["losses"][-1],
            }
        else:
            made[key] = str(wrong)
    return made


def fp16(given: argparse.Namespace) -> dict[str, Any]:
    """Scales and skipped steps beside those that DeepSpeed's scaler decides for a plain loop."""
    theirs = run(Row("", "", "half-plain"), [], STEPS, given)
    ours = run(Row("", "", "half-patrickstar"), [], STEPS, given)
    if "fp16" not in theirs or "fp16" not in ours:
        return {"error": theirs.get("error") or ours.get("error") or "no answer"}
    a, b = ours["fp16"], theirs["fp16"]
    taken = [i for i, skipped in enumerate(b["skipped"]) if not skipped]
    scales = b["scales"]
    return {
        "steps": len(scales),
        "same_scales": a["scales"] == scales,
        "same_skips": a["skipped"] == b["skipped"],
        "skipped": sum(b["skipped"]),
        "grown": sum(after > before for before, after in itertools.pairwise(scales)),
        **difference([a["losses"][i] for i in taken], [b["losses"][i] for i in taken]),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    everything = [[model, precision] for precision in PRECISIONS for model in MODELS]

    def answer_of(row: Row) -> dict[str, Any]:
        found = run(row, everything, STEPS, given)
        print(f"{row.key}: {found.get('error', 'done')}", flush=True)
        return found

    def memory_of(row: Row) -> dict[str, Any]:
        answer = run(row, [[LARGER, "bf16"]], LARGER_STEPS, given)
        one = answer.get(f"{LARGER} bf16")
        good = isinstance(one, dict)
        return {
            "name": row.name,
            "error": None if good else str(one or answer.get("error")),
            "peak": answer.get("peak"),
            "losses": one["losses"] if isinstance(one, dict) else None,
        }

    with ThreadPoolExecutor(given.jobs) as pool:
        rows, larger = pool.map(answer_of, ROWS), pool.map(memory_of, MEMORY)
        half = pool.submit(fp16, given)
        answers = dict(zip((row.key for row in ROWS), rows, strict=True))
        memory = dict(zip((row.key for row in MEMORY), larger, strict=True))
        scales = half.result()
    shutil.rmtree(answers_folder(given), ignore_errors=True)
    reference = answers[REFERENCE]
    return {
        "steps": STEPS,
        "reference": REFERENCE,
        "torch": answers["plain"].get("torch"),
        "deepspeed": reference.get("deepspeed"),
        "rows": {
            row.key: {
                "name": row.name,
                "options": row.options,
                "compared": compared(answers[row.key], reference),
            }
            for row in ROWS
        },
        "fp16": scales,
        "memory": {"model": LARGER, "rows": memory},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--deepspeed-python", default=sys.executable)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="rows at once")
    given = parser.parse_args()
    text = json.dumps(measure(given), indent=1)
    if given.json:
        given.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
