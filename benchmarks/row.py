"""The process that measures one row: `python -m benchmarks.row JOB ANSWER`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.job import Answer, Job


def status_bytes(field: str) -> int:
    """A field of /proc/self/status that is given in kB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def disk_traffic() -> tuple[int, int]:
    """Bytes this process has had read from and written to disks."""
    pairs = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(pairs["read_bytes"]), int(pairs["write_bytes"])


def process_age_s() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - started / os.sysconf("SC_CLK_TCK")


def measure(job: Job) -> Answer:
    """Train as `job` says; what goes to disk goes into a folder that is removed afterwards."""
    import torch

    torch.set_num_threads(job.threads)
    system = importlib.import_module(f"benchmarks.systems.{job.system}")
    versions = system.load()
    from patrickstar.models import preset

    import_rss = status_bytes("VmRSS")
    config = dataclasses.replace(preset(job.model), **job.changes)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=job.disk) as folder:
        torch.manual_seed(job.seed)
        trainer = system.start(dataclasses.replace(job, disk=folder), config)
        try:
            return train(job, trainer, config.vocabulary, versions, import_rss)
        finally:
            trainer.close()


def train(
    job: Job, trainer: Any, vocabulary: int, versions: dict[str, str], import_rss: int
) -> Answer:
    """The steps of `job`, each looked at from outside."""
    import torch

    generator = torch.Generator().manual_seed(job.seed + 1)
    shape = (job.sequences, job.length + 1)
    start_up = process_age_s()
    losses, seconds, read, written = [], [], [], []
    moved: dict[str, int] = {}
    batch = torch.randint(0, vocabulary, shape, generator=generator)
    for step in range(job.warmup + job.steps):
        if step and not job.repeat:
            batch = torch.randint(0, vocabulary, shape, generator=generator)
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        moved_before, disk_before = trainer.moved(), disk_traffic()
        began = time.perf_counter()
        losses.append(trainer.step(tokens, targets))
        seconds.append(time.perf_counter() - began)
        disk_after = disk_traffic()
        read.append(disk_after[0] - disk_before[0])
        written.append(disk_after[1] - disk_before[1])
        moved = {pair: n - moved_before.get(pair, 0) for pair, n in trainer.moved().items()}
    return Answer(
        parameters=trainer.parameters,
        losses=losses,
        step_s=seconds,
        disk_read=read,
        disk_written=written,
        moved=moved,
        phases={
            name: statistics.median(times[job.warmup :])
            for name, times in trainer.phases.seconds.items()
        },
        import_rss=import_rss,
        peak_rss=status_bytes("VmHWM"),
        start_up_s=start_up,
        versions=versions,
        notes=trainer.notes(),
    )


def main() -> None:
    job, answer = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    answer.write_text(json.dumps(dataclasses.asdict(measure(job)), indent=1))


if __name__ == "__main__":
    main()
