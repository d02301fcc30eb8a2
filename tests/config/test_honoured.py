"""What is called honoured is acted on."""

from __future__ import annotations

import re
from pathlib import Path

import patrickstar
from patrickstar.config.key import Status
from patrickstar.config.keys import TABLE

# Read in this package, which resolves them.
RESOLVED = {
    "bf16.enabled",
    "fp16.enabled",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "data_types.param_dtype",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
}


def test_every_honoured_key_is_read_by_something() -> None:
    package = Path(patrickstar.__file__).parent
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for file in package.rglob("*.py")
        if file.parent.name != "config"
    )
    unread = {
        path
        for path, key in TABLE.items()
        if key.status is Status.HONOURED
        and not key.section
        and not key.today
        and key.parent not in ("optimizer.params", "scheduler.params")  # taken as a whole
        and not re.search(rf"\.{key.name}\b", code)
    }
    assert unread - RESOLVED == set()
