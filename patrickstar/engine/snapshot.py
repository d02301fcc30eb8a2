"""A checkpoint of one moment, taken while training goes on.

Nothing but the optimizer's step changes weights, masters and moments, and it does so chunk by
chunk. So a chunk is copied right before its update, when all that is aligned with it is in memory
anyway: nothing is moved for the sake of the checkpoint, no two steps are mixed, and what is copied
waits for a thread to write it (see `checkpoint.background`). Chunks that the step does not touch
are copied when it is over. A weight that is changed by hand before the step is copied before that.

Everything small (buffers, counters, random states) is copied at once; so is all of it in the middle
of an accumulation, since the next backward changes gradients.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import SHARD_BYTES
from patrickstar.checkpoint.background import BackgroundCheckpoint
from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.contents import Training
from patrickstar.engine.saving import (
    Wanted,
    buffer_sources,
    config_file,
    run_state,
    wanted_states,
    wanted_weights,
)
from patrickstar.engine.together import Walk


class Snapshot:
    """Copies chunks before they change, until all are copied.

    Args:
        waiting_bytes: how many bytes of copies may wait to be written; None allows two chunks and
            what is aligned with them where the host has a budget, and half of the memory that is
            free where it has none. A step that has more to copy waits for the disk.

    Attributes:
        stall: seconds that the run has been held up by copying and waiting so far.
    """

    def __init__(
        self,
        training: Training,
        folder: Path,
        tag: str,
        client_state: dict[str, Any],
        *,
        keep: int | None = None,
        latest: bool = True,
        frozen: bool = True,
        waiting_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._training, self.stall = training, 0.0
        weights, states = wanted_weights(training, frozen=frozen), wanted_states(training)
        buffers, walk = buffer_sources(training), Walk()
        began = time.perf_counter()
        if waiting_bytes is None:
            waiting_bytes = _waiting_bytes(training)
        self._missing: dict[int, list[tuple[Wanted, int]]] = {}
        for wanted in (*weights, *states):
            for number, part in enumerate(wanted.member.parts):
                self._missing.setdefault(part.aligned.parameter.id, []).append((wanted, number))
        self._writing = BackgroundCheckpoint(
            folder,
            tag,
            [wanted.source(training, walk) for wanted in weights] + buffers,
            [wanted.source(training, walk) for wanted in states],
            run_state(training, client_state, weights),
            waiting_bytes=waiting_bytes,
            extra_files=config_file(training.module),
            keep=keep,
            latest=latest,
            shard_bytes=shard_bytes,
        )
        self._mark = training.state.home.on_write
        training.state.home.on_write = self._before_write
        for buffer in buffers:
            self._put_buffer(buffer)
        if any(slot.has_grad for _, slot in training.state.slots.values()):
            self.copy_rest()  # the next backward adds to the gradients
        self._finish_if_complete()
        self.stall = time.perf_counter() - began

    @property
    def path(self) -> Path:
        return self._writing.path

    @property
    def is_copied(self) -> bool:
        """Whether the run may change everything."""
        return not self._missing

    def before_update(self, aligned: AlignedChunks) -> None:
        """The optimizer is about to change these chunks, which are where it needs them."""
        self._copy_all(aligned, in_use=True)

    def copy_rest(self) -> None:
        """Copy all that is not copied yet."""
        if self._missing:
            # The accesses that follow are no part of the iteration that may be running.
            self._training.state.manager.abandon_iteration()
            for aligned in self._training.state.aligned:
                self._copy_all(aligned)

    def wait(self) -> None:
        """Copy what is missing, and wait until the checkpoint is there.

        Raises:
            CheckpointError: it could not be written.
        """
        self.copy_rest()
        self._writing.wait()

    def abandon(self) -> None:
        """Give the checkpoint up."""
        self._missing.clear()
        self._restore()
        self._writing.abandon()

    def _copy_all(self, aligned: AlignedChunks, *, in_use: bool = False) -> None:
        began = time.perf_counter()
        for wanted, number in self._missing.pop(aligned.parameter.id, ()):
            self._copy(aligned, wanted, number, in_use)
        self._finish_if_complete()
        self.stall += time.perf_counter() - began

    def _copy(self, aligned: AlignedChunks, wanted: Wanted, number: int, in_use: bool) -> None:
        first = wanted.member.parts[number].first
        made_anew = aligned.master is not None and not aligned.changed
        if wanted.chunk_of(aligned) is aligned.parameter and made_anew:
            # They are what their masters round to, and may be gone already: see the optimizer.
            masters = Wanted("", wanted.member, lambda chunks: chunks.master, wanted.has_values)
            with masters.values(self._training, number, in_use=in_use) as values:
                copy = values.to(wanted.dtype, memory_format=torch.contiguous_format)
        else:
            with wanted.values(self._training, number, in_use=in_use) as values:
                copy = values.clone(memory_format=torch.contiguous_format)
        del values
        self._writing.put(wanted.key, first, copy)

    def _put_buffer(self, buffer: TensorSource) -> None:
        for part in buffer.parts():
            copy = part.detach().cpu().clone(memory_format=torch.contiguous_format)
            self._writing.put(buffer.name, 0, copy)

    def _before_write(self, chunk: int) -> None:
        aligned = self._training.state.of_chunk(chunk)
        if aligned is not None:
            self._copy_all(aligned)
        if self._mark is not None:
            self._mark(chunk)

    def _finish_if_complete(self) -> None:
        if not self._missing:
            self._restore()
            self._writing.complete()

    def _restore(self) -> None:
        home = self._training.state.home
        if home.on_write == self._before_write:
            home.on_write = self._mark


def _waiting_bytes(training: Training) -> int:
    state = training.state
    least = 2 * state.smallest_update()
    if state.manager.tiers[state.update_tier].capacity is not None:
        return least
    return max(least, _free_memory() // 2)


def _free_memory() -> int:
    """Bytes that the system could give without swapping; 0 where it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
