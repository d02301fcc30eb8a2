"""What one process is asked to measure, and what it answers.

A row of a table is measured by a process of its own, so that its peak memory is its own and nothing
is left over from another. The job goes to it as JSON on the command line and the answer comes back
as JSON in a file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        system: who trains: a module of `benchmarks.systems`.
        model: a preset of `patrickstar.models`.
        options: the settings of the system, which its module explains.
        changes: fields of the preset's configuration that are different, such as `layers`.
        sequences: sequences in a batch.
        length: tokens of a sequence.
        steps: optimizer steps that count.
        warmup: optimizer steps before them.
        clipping: largest global gradient norm; 0 is off.
        threads: compute threads.
        disk: a folder on the disk to be used.
        seed: of the weights and of the tokens.
        learning_rate: of AdamW.
        repeat: whether every step has the first batch again, so that its loss falls.
    """

    system: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    sequences: int = 1
    length: int = 512
    steps: int = 6
    warmup: int = 2
    clipping: float = 1.0
    threads: int = 2
    disk: str = "."
    seed: int = 0
    learning_rate: float = 1e-4
    repeat: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


@dataclass
class Answer:
    """What the process saw.

    Attributes:
        parameters: number of weights of the model.
        losses: of every step, warm-up included.
        step_s: seconds of every step, warm-up included.
        disk_read, disk_written: bytes that the process had read from and written to disks in each
            step, as the kernel counted them.
        moved: bytes that the system says it moved in the last step, by "from->to".
        phases: seconds of forward, backward and update, the median step.
        import_rss: resident bytes after the imports, before the model.
        peak_rss: the most that were ever resident.
        start_up_s: seconds from the start of the process to the first step.
        versions: of the libraries in use.
        notes: what the system says about how it was set.
    """

    parameters: int
    losses: list[float]
    step_s: list[float]
    disk_read: list[int]
    disk_written: list[int]
    moved: dict[str, int]
    phases: dict[str, float]
    import_rss: int
    peak_rss: int
    start_up_s: float
    versions: dict[str, str]
    notes: dict[str, Any]
