"""One safetensors file, written and read tensor by tensor.

Writing: all names, dtypes and shapes are known first, so the header is; then each source hands over
its contents in parts that follow each other in row-major order, and a part is forgotten as soon as
it is on its way. Memory needed beyond what the source holds: none, or one part where it has to be
made contiguous first. The file's SHA-256 is computed on the way.

Reading: straight into the memory where the contents belong, any range of elements.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from patrickstar.checkpoint.header import StoredTensor, build_header, read_header
from patrickstar.checkpoint.paths import create_private, open_regular, write_all
from patrickstar.checkpoint.record import FileRecord, digest_of, verify
from patrickstar.errors import CheckpointError
from patrickstar.workers import Workers

_BLOCK = 8 << 20


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be stored.

    Attributes:
        parts: called once; yields tensors of `dtype` that together are the contents, in row-major
            order. A part is used only until the next one is asked for.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSource:
        """A tensor that is in memory anyway."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: iter((tensor,)))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    assert sys.byteorder == "little", "safetensors files are little-endian"
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_tensor_file(
    path: Path, sources: Sequence[TensorSource], metadata: Mapping[str, str]
) -> FileRecord:
    """Write `path`, which must not exist, and wait until it is on the disk.

    Raises:
        CheckpointError: a tensor cannot be stored.
        OSError: the disk is full or failed.
    """
    header, places = build_header([(s.name, s.dtype, s.shape) for s in sources], metadata)
    digest = hashlib.sha256(header)
    total = len(header) + sum(place.nbytes for place in places)
    file = create_private(path)
    # Hashing takes about as long as writing; both let other threads run.
    with Workers(1, "patrickstar-hash") as beside:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, total)  # a full disk is found before, not in the middle
            write_all(file, memoryview(header), 0)
            for source, place in zip(sources, places, strict=True):
                end = _write_tensor(file, source, place, digest.update, beside)
                assert end == place.offset + place.nbytes, f"{source.name}: parts are incomplete"
            os.fsync(file)
        finally:
            os.close(file)
    return FileRecord(total, digest.hexdigest())


def _write_tensor(
    file: int,
    source: TensorSource,
    place: StoredTensor,
    update: Callable[[memoryview], None],
    beside: Workers,
) -> int:
    offset = place.offset
    with contextlib.closing(_parts(source)) as parts:
        for part in parts:
            assert part.dtype is source.dtype, f"{source.name}: {part.dtype}"
            data = bytes_of(part.detach().cpu().contiguous())
            hashed = beside.start(partial(update, data))
            try:
                write_all(file, data, offset)
            finally:
                hashed.wait()  # whatever happens, nobody reads the part once it is given up
            offset += data.nbytes
            del part, data, hashed  # nothing may keep the part's memory in use from here on
    return offset


def _parts(source: TensorSource) -> Generator[torch.Tensor, None, None]:
    """As a generator, which can be closed: a failed write gives up what it holds at once."""
    yield from source.parts()


class TensorFileWriter:
    """A new safetensors file whose contents come in any order.

    Args:
        sources: names, dtypes and shapes; their parts are not asked for.
    """

    def __init__(
        self, path: Path, sources: Sequence[TensorSource], metadata: Mapping[str, str]
    ) -> None:
        header, places = build_header([(s.name, s.dtype, s.shape) for s in sources], metadata)
        self._path, self._places = path, {place.name: place for place in places}
        self._total = len(header) + sum(place.nbytes for place in places)
        self._file = create_private(path)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self._total)
            write_all(self._file, memoryview(header), 0)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, start: int, tensor: torch.Tensor) -> None:
        """Write `tensor`, contiguous and on the CPU, at element `start` of tensor `name`."""
        place = self._places[name]
        assert tensor.dtype is place.dtype and start + tensor.numel() <= place.numel, name
        write_all(self._file, bytes_of(tensor), place.offset + start * place.dtype.itemsize)

    def finish(self) -> FileRecord:
        """Wait until the file is on the disk, close it, and say what is in it."""
        os.fsync(self._file)
        record = FileRecord(self._total, digest_of(self._file, self._path))
        self.close()
        return record

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class TensorFile:
    """An open safetensors file. Errors are `CheckpointError`s that name it.

    Attributes:
        tensors: what is in it, by name.
        metadata: the texts in its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self.tensors, self.metadata = read_header(self._file, path)
        except BaseException:
            self.close()
            raise

    def verify(self, record: FileRecord) -> None:
        """Compare the length and the SHA-256 with what they should be."""
        verify(self._file, self.path, record)

    def read_into(self, stored: StoredTensor, target: torch.Tensor, start: int = 0) -> None:
        """Fill `target` with the elements of `stored` from number `start` on, in row-major order.

        Args:
            target: any dtype; values are converted as by `copy_`.
        """
        read_elements(self._file, self.path, stored, target, start)

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """The whole tensor in fresh memory."""
        made = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(stored, made)
        return made

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_elements(
    file: int, path: Path, stored: StoredTensor, target: torch.Tensor, start: int = 0
) -> None:
    """Fill `target` with the elements of `stored`, in the open file, from number `start` on.

    Raises:
        CheckpointError: the file ends too early or cannot be read.
    """
    assert start >= 0 and start + target.numel() <= stored.numel, stored.name
    where = stored.offset + start * stored.dtype.itemsize
    if target.dtype is stored.dtype and target.is_contiguous() and target.is_cpu:
        _read(file, path, bytes_of(target), where)
        return
    if not target.is_contiguous():
        whole = torch.empty(target.shape, dtype=stored.dtype)
        _read(file, path, bytes_of(whole), where)
        target.copy_(whole)
        return
    flat = target.view(-1)
    block = _BLOCK // stored.dtype.itemsize
    for first in range(0, flat.numel(), block):
        part = torch.empty(min(block, flat.numel() - first), dtype=stored.dtype)
        _read(file, path, bytes_of(part), where + first * stored.dtype.itemsize)
        flat[first : first + part.numel()].copy_(part)


def _read(file: int, path: Path, into: memoryview, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        try:
            count = os.preadv(file, [into[done : done + _BLOCK]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {str(path)!r} at byte {offset + done}: {error.strerror}"
            ) from error
        if count <= 0:
            raise CheckpointError(f"{str(path)!r} ends at byte {offset + done}, too early")
        done += count
