"""A checkpoint that a thread writes while the run goes on.

The run hands over copies of its tensors, in parts and in any order, and the thread writes them to
their places. The copies that wait to be written are limited: who hands over more waits. So a disk
that is too slow slows the run down instead of filling its memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint import folder as folders
from patrickstar.checkpoint.checkpoint import OPTIMIZER, WEIGHTS
from patrickstar.checkpoint.manifest import Manifest, write_manifest
from patrickstar.checkpoint.paths import write_new
from patrickstar.checkpoint.record import FileRecord, record_of
from patrickstar.checkpoint.shards import METADATA, SHARD_BYTES, named_shards, write_index
from patrickstar.checkpoint.tensor_file import TensorFileWriter, TensorSource
from patrickstar.errors import CheckpointError

_Part = tuple[str, int, torch.Tensor]


class BackgroundCheckpoint:
    """Writes `folder/tag`, as `write_checkpoint` does, from what `put` is given.

    Args:
        weights: names, dtypes and shapes of the model's tensors; their parts are not asked for.
        optimizer: the same of the optimizer's tensors. No name may be in both.
        waiting_bytes: how many bytes of copies may wait to be written.
    """

    def __init__(
        self,
        folder: Path,
        tag: str,
        weights: Sequence[TensorSource],
        optimizer: Sequence[TensorSource],
        state: dict[str, Any],
        *,
        waiting_bytes: int,
        extra_files: Mapping[str, bytes] | None = None,
        keep: int | None = None,
        latest: bool = True,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._folder, self._tag, self._keep, self._latest = folder, tag, keep, latest
        self._sets = {WEIGHTS: list(weights), OPTIMIZER: list(optimizer)}
        self._state, self._extra, self._shard_bytes = state, dict(extra_files or {}), shard_bytes
        # Bytes; the caller counts what it hands over, the thread what it has done.
        self._limit, self._handed, self._done = waiting_bytes, 0, 0
        # Queues in C, since Ctrl-C may come anywhere: see patrickstar/workers.py.
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # `_done` or `_error` changed
        self._complete = self._abandoned = False
        self._error: BaseException | None = None
        # Not waited for at the end of a process that forgot to: an incomplete checkpoint is none.
        self._thread = threading.Thread(target=self._run, name="patrickstar-save", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._give_up()
            raise

    @property
    def path(self) -> Path:
        return self._folder / self._tag

    def put(self, name: str, start: int, part: torch.Tensor) -> None:
        """Hand over elements of tensor `name` from number `start` on; `part` is not changed again.

        Waits while too much is waiting already. After a failure it does nothing; `wait` tells.
        """
        while (
            self._error is None
            and (waiting := self._handed - self._done) > 0
            and waiting + part.nbytes > self._limit
        ):
            self._news.get()
        if self._error is None:
            self._parts.put((name, start, part))
            self._handed += part.nbytes

    def complete(self) -> None:
        """Everything has been handed over."""
        self._complete = True
        self._parts.put(None)

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: it could not be written.
        """
        assert self._complete or self._abandoned, "what is not handed over cannot be written"
        self._thread.join()
        if self._error is not None and not self._abandoned:
            raise self._error

    def abandon(self) -> None:
        """Give the checkpoint up; nothing of it is left."""
        self._give_up()
        self._thread.join()

    def _give_up(self) -> None:
        self._abandoned = True
        self._parts.put(None)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            while not self._parts.empty():
                self._parts.get()
            self._news.put(None)

    def _write(self) -> None:
        with ExitStack() as stack:
            temporary = stack.enter_context(
                folders.new_checkpoint(self._folder, self._tag, self._keep, latest=self._latest)
            )
            files: dict[str, TensorFileWriter] = {}
            file_of: dict[str, TensorFileWriter] = {}
            with ExitStack() as open_files:
                for stem, sources in self._sets.items():
                    for name, shard in named_shards(stem, sources, self._shard_bytes).items():
                        file = TensorFileWriter(temporary / name, shard, METADATA)
                        files[name] = open_files.enter_context(closing(file))
                        file_of.update((source.name, file) for source in shard)
                while (part := self._next()) is not None:
                    file_of[part[0]].write(*part)
                    self._done += part[2].nbytes
                    del part
                    self._news.put(None)
                records = {name: file.finish() for name, file in files.items()}
            self._write_rest(temporary, records)

    def _write_rest(self, temporary: Path, records: dict[str, FileRecord]) -> None:
        for stem, sources in self._sets.items():
            records |= write_index(temporary, stem, sources, self._shard_bytes)
        for name, data in self._extra.items():
            write_new(temporary / name, data)
            records[name] = record_of(data)
        sequence = folders.next_sequence(self._folder)
        write_manifest(temporary, Manifest(sequence, records, self._state))

    def _next(self) -> _Part | None:
        part = self._parts.get()
        if self._abandoned:
            raise CheckpointError(f"the checkpoint {self._tag!r} was given up")
        return part
