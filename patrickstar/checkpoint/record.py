"""What a complete file must look like."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import CheckpointError

_BLOCK = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """A file's length in bytes and its SHA-256 in hex."""

    nbytes: int
    sha256: str


def record_of(data: bytes) -> FileRecord:
    """The record of a file with these contents."""
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def verify(file: int, path: Path, record: FileRecord) -> None:
    """Compare an open file with its record.

    Raises:
        CheckpointError: it is truncated, longer, or has other contents.
    """
    size = os.fstat(file).st_size
    if size != record.nbytes:
        short = "truncated" if size < record.nbytes else "longer than it was written"
        raise CheckpointError(
            f"{str(path)!r} is {short}: it has {size} bytes, not {record.nbytes}. "
            "Load an older checkpoint by its tag"
        )
    if digest_of(file, path) != record.sha256:
        raise CheckpointError(
            f"{str(path)!r} is damaged: its contents do not match their checksum. "
            "Load an older checkpoint by its tag"
        )


def digest_of(file: int, path: Path) -> str:
    """The SHA-256 of an open file, in hex.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest, block, done = hashlib.sha256(), bytearray(_BLOCK), 0
    while True:
        try:
            count = os.preadv(file, [block], done)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {str(path)!r} at byte {done}: {error.strerror}"
            ) from error
        if count <= 0:
            return digest.hexdigest()
        digest.update(memoryview(block)[:count])
        done += count
