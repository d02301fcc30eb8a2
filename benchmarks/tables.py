"""Which rows are measured, and with which settings.

DeepSpeed's settings follow its own documentation ("DeepSpeed Configuration JSON", "ZeRO-Infinity"
and "DeepNVMe" pages) and were then varied on the machine at hand; the better value was kept. They
are printed under the tables.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from benchmarks.prediction import CASES

# What `ds_nvme_tune` looks for: large blocks, a deep queue and more than one thread.
AIO = {
    "block_size": 8 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
OPPONENTS = ("plain", "patrickstar", "deepspeed")


@dataclass(frozen=True)
class Row:
    """A row of a table: who, called what, with which options; its model, if not the table's.

    `reference` is the row that its losses are compared with, if not the table's.
    """

    key: str
    name: str
    opponent: str
    options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    reference: str | None = None

    @property
    def system(self) -> str:
        """The module of `benchmarks.systems`."""
        return {"plain": "plain", "patrickstar": "chunked", "deepspeed": "zero"}[self.opponent]


@dataclass(frozen=True)
class Table:
    """Rows that train the same model on the same tokens, or `kind` says otherwise.

    `steps` and `warmup` are what the command line says where they are None; `time_limit` is in
    seconds for a process.
    """

    key: str
    title: str
    model: str
    rows: tuple[Row, ...]
    length: int = 512
    sequences: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    reference: str = "plain"
    kind: str = "training"
    steps: int | None = None
    warmup: int | None = None
    time_limit: float = 0.0
    learning_rate: float = 1e-4
    repeat: bool = False


# PatrickStar has the C library keep what is freed; so does this loop, and a step takes less time.
PLAIN = Row(
    "plain",
    "Plain loop: fp32 masters, `AdamW(fused=True)`",
    "plain",
    {
        "environment": {
            "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        }
    },
)
# Updates in the backward cannot clip, so what they are compared with does not either.
UNCLIPPED = dataclasses.replace(
    PLAIN,
    key="plain-unclipped",
    name="Plain loop, no clipping",
    options={**PLAIN.options, "clipping": 0.0},
    reference="plain-unclipped",
)
IN_MEMORY = Row("patrickstar-memory", "PatrickStar, everything in memory", "patrickstar")
ZERO_CPU = Row(
    "deepspeed-cpu",
    "DeepSpeed ZeRO-3, CPU offload",
    "deepspeed",
    {
        "zero": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    },
)
# A pipelined optimizer needs buffers for the tiles that are read, updated and written at once; with
# the default count of 4 it stops with an assertion.
ZERO_NVME_SPEED = Row(
    "deepspeed-nvme-speed",
    "DeepSpeed ZeRO-Infinity (NVMe), tuned for speed",
    "deepspeed",
    {
        "zero": {
            "stage": 3,
            "offload_optimizer": {
                "device": "nvme",
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,
            },
            "offload_param": {"device": "cpu"},
            "sub_group_size": 100_000_000,
        },
        "aio": AIO,
    },
)


def zero_nvme_memory(largest: int, model: str | None = None) -> Row:
    """DeepSpeed with as little memory as it can be set to, for a largest weight of `largest`.

    Pinned buffers are resident whether they are used or not, and so are the defaults for parameter
    buffers (5 of 100M elements); here they are as large as the largest parameter needs.
    """
    return Row(
        "deepspeed-nvme-memory" + (f"-{model}" if model else ""),
        "DeepSpeed ZeRO-Infinity (NVMe), tuned for memory",
        "deepspeed",
        {
            "zero_init": True,
            "remote": "nvme",
            "zero": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "pin_memory": False},
                "offload_param": {
                    "device": "nvme",
                    "buffer_size": largest,
                    "buffer_count": 12,
                    "pin_memory": False,
                },
                "sub_group_size": 3 * largest,
                "reduce_bucket_size": largest,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0,
            },
            "aio": AIO,
        },
        model,
    )


ZERO_NVME_MEMORY = zero_nvme_memory(5_000_000)


@dataclass(frozen=True)
class Script:
    """A table that a program of its own measures: its module and arguments, part by part."""

    key: str
    module: str
    parts: tuple[tuple[str, ...], ...]
    opponent: bool = False  # whether it is told where DeepSpeed is


SCRIPTS = {
    "parity": Script("parity", "benchmarks.parity.table", ((),), opponent=True),
    "overheads": Script("overheads", "benchmarks.overheads", ((),)),
    "network": Script("network", "benchmarks.network", (("--rate", "1gbit"), ("--rate", "4gbit"))),
    "prediction": Script(
        "prediction", "benchmarks.prediction", tuple(("--case", name) for name in CASES)
    ),
    "rss": Script(
        "rss",
        "benchmarks.resident",
        (
            ("--model", "gpt-tiny", "--host", "9MiB"),
            ("--model", "gpt-25m", "--host", "160MiB"),
            ("--model", "gpt-25m", "--host", "320MiB", "--precision", "fp32"),
            ("--model", "bert-base", "--host", "700MiB"),
            ("--model", "bert-base", "--host", "1.25GiB", "--precision", "fp32"),
            ("--model", "llama-130m", "--host", "1GiB"),
            ("--model", "gpt-300m", "--host", "1.32GiB"),
            ("--model", "gpt-300m", "--host", "2GiB"),
            ("--model", "gpt-300m", "--host", "4GiB", "--precision", "fp32"),
            ("--model", "gpt-1b", "--host", "4GiB", "--steps", "3"),
        ),
    ),
    "policy": Script(
        "policy",
        "benchmarks.policies",
        (
            ("--model", "gpt-25m", "--host", "256MiB"),
            ("--model", "gpt-300m", "--host", "2GiB"),
        ),
    ),
}


def on_disk(key: str, host: str, model: str | None = None) -> Row:
    """PatrickStar with `host` of memory and a disk."""
    return Row(
        key,
        f"PatrickStar, host memory {host} + disk",
        "patrickstar",
        {"memory": {"host": host}, "disk": True},
        model,
    )


def in_backward(row: Row) -> Row:
    """`row` without clipping, with its updates made in the backward."""
    return dataclasses.replace(
        row,
        key=f"{row.key}-in-backward",
        name=f"{row.name}, no clipping, updates in the backward",
        options={**row.options, "clipping": 0.0, "update_in_backward": True},
        reference=UNCLIPPED.key,
    )


def with_model(row: Row, model: str) -> Row:
    """`row` for another model than its table's."""
    return dataclasses.replace(row, key=f"{row.key}-{model}", model=model)


IN_MEMORY_IN_BACKWARD = in_backward(IN_MEMORY)
TABLES = {
    "first": Table(
        "first",
        "gpt-300m, bf16 with fp32 masters, AdamW, 512 tokens a step",
        "gpt-300m",
        (
            PLAIN,
            IN_MEMORY,
            UNCLIPPED,
            IN_MEMORY_IN_BACKWARD,
            on_disk("patrickstar-disk", "2GiB"),
            ZERO_CPU,
            ZERO_NVME_SPEED,
            ZERO_NVME_MEMORY,
        ),
    ),
    "small": Table(
        "small",
        "gpt-25m, everything in memory",
        "gpt-25m",
        (PLAIN, IN_MEMORY, UNCLIPPED, IN_MEMORY_IN_BACKWARD, ZERO_CPU),
    ),
    "third": Table(
        "third",
        "gpt-300m with a third of the state in memory",
        "gpt-300m",
        (
            PLAIN,
            on_disk("patrickstar-third", "1.32GiB"),
            UNCLIPPED,
            in_backward(on_disk("patrickstar-third", "1.32GiB")),
            ZERO_NVME_SPEED,
            ZERO_NVME_MEMORY,
        ),
    ),
    # The largest that each is known to train here, and the next larger one.
    "capacity": Table(
        "capacity",
        "The largest model",
        "gpt-4b",
        (
            with_model(PLAIN, "gpt-1b"),
            with_model(PLAIN, "gpt-4b"),
            with_model(ZERO_CPU, "gpt-300m"),
            with_model(ZERO_CPU, "gpt-1b"),
            with_model(ZERO_NVME_SPEED, "gpt-300m"),
            with_model(ZERO_NVME_SPEED, "gpt-1b"),
            zero_nvme_memory(17_000_000, "gpt-1b"),
            zero_nvme_memory(41_500_000, "gpt-4b"),
            with_model(IN_MEMORY, "gpt-1b"),
            on_disk("patrickstar-disk-gpt-4b", "12GiB", "gpt-4b"),
        ),
        kind="capacity",
        steps=3,
        warmup=1,
        time_limit=1800.0,
        learning_rate=1e-6,
        repeat=True,
    ),
}
