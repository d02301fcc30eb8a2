"""The facts of a machine, as a file has them.

Rates are operations or bytes a second, sizes are bytes. Those measured on a machine are what it
reached; those from data sheets are what it cannot exceed, so a step predicted from them is the step
at best. `source` says which. A copy's rate counts the bytes that it reads and those it writes.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]
Dtype = Annotated[str, Field(pattern="^(float32|bfloat16|float16)$")]


class Facts(BaseModel):
    """Refuses what it does not know and what changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Processor(Facts):
    """What computes.

    Attributes:
        name: as its maker calls it.
        flops: multiplications and additions a second in matrix products, by dtype.
        copy_bytes_per_s: of a copy within its memory, read and written.
        update_bytes_per_s: of the optimizer's pass, read and written; that of a copy if not given.
        cores: of a CPU.
        threads: that the rates were measured with.
        capability: the instructions that PyTorch uses.
    """

    name: str
    flops: dict[Dtype, Rate] = Field(min_length=1)
    copy_bytes_per_s: Rate
    update_bytes_per_s: Rate | None = None
    cores: Annotated[int, Field(gt=0)] | None = None
    threads: Annotated[int, Field(gt=0)] | None = None
    capability: str | None = None

    def flops_of(self, dtype: torch.dtype) -> float:
        """The rate of products in `dtype`; where it is not known, the slowest that is."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name, min(self.flops.values()))

    @property
    def update_rate(self) -> float:
        """Bytes a second that an update reads and writes."""
        return self.update_bytes_per_s or self.copy_bytes_per_s


class Accelerator(Processor):
    """One accelerator of `count`.

    Attributes:
        memory_bytes: of each.
        link_bytes_per_s: between its memory and the host's, in one direction.
    """

    count: Annotated[int, Field(gt=0)] = 1
    memory_bytes: Bytes
    link_bytes_per_s: Rate


class Disk(Facts):
    """Direct reads and writes of a large file, as many in flight as training has.

    Attributes:
        folder: where it was measured.
        kind: of the file system.
        direct: whether the page cache was bypassed.
        size_bytes: what a run may use of it.
    """

    read: Rate
    write: Rate
    folder: str | None = None
    kind: str | None = None
    direct: bool = True
    size_bytes: Bytes | None = None


class Network(Facts):
    """The links between ranks.

    Attributes:
        ranks_per_node: ranks that share the fast links.
        inside_bytes_per_s: that a rank sends to others of its node.
        across_bytes_per_s: that a whole node sends to others.
        latency_s: of one message.
    """

    ranks_per_node: Annotated[int, Field(gt=0)] = 8
    inside_bytes_per_s: Rate
    across_bytes_per_s: Rate
    latency_s: Annotated[float, Field(ge=0, lt=1)] = 5e-6


class Machine(Facts):
    """A machine.

    Attributes:
        name: for people.
        source: where the numbers come from.
        measured: when they were measured on this machine; None for those from data sheets.
        others: part of the processors that other programs used meanwhile.
        memory_bytes: of the host.
        processor: the host's.
        accelerator: what computes instead of it, if there is one.
        disk: where chunks can go.
        network: to other ranks.
    """

    name: str
    source: str
    measured: str | None = None
    others: Annotated[float, Field(ge=0, le=1)] = 0.0
    memory_bytes: Bytes | None = None
    processor: Processor
    accelerator: Accelerator | None = None
    disk: Disk | None = None
    network: Network | None = None

    @property
    def computes(self) -> Processor:
        """What forward and backward run on."""
        return self.accelerator or self.processor
