"""The process of one row: `python -m benchmarks.parity.process JOB ANSWER`.

JOB is JSON: the `system`, its `options`, the folder `disk`, the `steps`, and `runs`, pairs of
model and precision; for fp16 the system is `half-plain` or `half-patrickstar`. A run that fails
leaves its error in the answer, and the next one goes on. The answer also has the peak resident
memory above what the libraries took, which tells something where there was one run of a model that
is not tiny.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.parity import half, runs, task
from benchmarks.row import status_bytes


def result_of(system: str, model: str, precision: str, options: Any, disk: str, steps: int) -> Any:
    """The losses and the bytes that moved a step, or a text that says why there are none."""
    try:
        with tempfile.TemporaryDirectory(prefix="parity-", dir=disk) as folder:
            run = runs.SYSTEMS[system](model, precision, options, folder)
            try:
                losses = [run.step(*task.batch(step)) for step in range(steps)]
                return {"losses": losses, "moved": run.moved() / steps}
            finally:
                run.close()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:500]


def load(system: str) -> None:
    """Import what `system` needs."""
    import patrickstar.api
    import patrickstar.models
    import patrickstar.optim  # noqa: F401

    if system == "deepspeed":
        import deepspeed  # noqa: F401


def main() -> None:
    job, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)  # such small models do not get faster by more
    system, steps, disk = job["system"], job["steps"], job["disk"]
    found: dict[str, Any] = {"torch": torch.__version__}
    if system == "half-plain":
        found["fp16"] = half.plain(steps)
    elif system == "half-patrickstar":
        with tempfile.TemporaryDirectory(prefix="parity-", dir=disk) as folder:
            found["fp16"] = half.patrickstar(steps, folder)
    else:
        load(system)
        before = status_bytes("VmRSS")
        for model, precision in job["runs"]:
            key = f"{model} {precision}"
            options = job["options"]
            found[key] = result_of(system, model, precision, options, disk, steps)
            gc.collect()
        found["peak"] = status_bytes("VmHWM") - before
    if system in ("deepspeed", "half-plain"):
        import deepspeed

        found["deepspeed"] = deepspeed.__version__
    made = answer.with_suffix(".new")
    made.write_text(json.dumps(found))
    made.rename(answer)
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed leaves threads behind


if __name__ == "__main__":
    main()
