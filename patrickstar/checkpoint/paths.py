"""Names and files of a checkpoint folder, which may have come from anywhere.

Every name that is read from a checkpoint is a plain file name: it cannot leave the folder. Files
are opened without following symbolic links, and only if they are regular files, so a checkpoint
cannot make us read a device, wait for a pipe, or show us a file from elsewhere. What is written is
private to the user: folders 0700, files 0600.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from patrickstar.errors import CheckpointError

_LONGEST_NAME = 200  # bytes; leaves room for what temporary names add to a tag
_BLOCK = 16 << 20


def check_name(name: object, what: str) -> str:
    """`name`, if it can only mean an entry of the folder itself.

    Raises:
        CheckpointError: it is no text, is empty, too long or hidden, or has a separator in it.
    """
    if not isinstance(name, str):
        raise CheckpointError(f"{what} is {type(name).__name__}, not a name")
    bad = (
        not name
        or name.startswith(".")
        or any(c in "/\\" or ord(c) < 32 or ord(c) == 127 for c in name)
        or len(os.fsencode(name.encode("utf-8", "replace"))) > _LONGEST_NAME
        or not name.isprintable()
    )
    if bad:
        raise CheckpointError(
            f"{what} {name[:80]!r} is no plain file name; use at most {_LONGEST_NAME} bytes, "
            "without '/', '\\' or control characters, not beginning with '.'"
        )
    return name


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A file descriptor of the regular file `path`, for reading.

    Raises:
        CheckpointError: there is no such file, or it is something else.
    """
    file = open_regular(path)
    try:
        yield file
    finally:
        os.close(file)


def open_regular(path: Path) -> int:
    """Open `path` for reading; the caller closes it. Errors as `opened`."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path, flags)
    except (OSError, ValueError) as error:
        if path.is_symlink():
            reason = "it is a symbolic link, which a checkpoint may not contain"
        else:
            reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"cannot open {str(path)!r}: {reason}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{str(path)!r} is not a regular file")
    return file


def read_small(path: Path, limit: int) -> bytes:
    """The contents of `path`, at most `limit` bytes; the size is checked before anything is read.

    Raises:
        CheckpointError: the file cannot be read, or is longer.
    """
    with opened(path) as file:
        size = os.fstat(file).st_size
        if size > limit:
            raise CheckpointError(
                f"{str(path)!r} has {size} bytes, more than the {limit} that such a file may have"
            )
        data = bytearray()
        while chunk := read_at(file, path, min(_BLOCK, limit + 1 - len(data)), len(data)):
            data += chunk
    if len(data) > limit:
        raise CheckpointError(f"{str(path)!r} grew beyond {limit} bytes while it was read")
    return bytes(data)


def read_at(file: int, path: Path, nbytes: int, offset: int) -> bytes:
    """At most `nbytes` bytes of an open file from byte `offset` on; none at its end.

    Raises:
        CheckpointError: the disk fails.
    """
    try:
        return os.pread(file, nbytes, offset)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {str(path)!r} at byte {offset}: {error.strerror}"
        ) from error


def create_private(path: Path) -> int:
    """Make the file `path`, which must not exist, for writing; only this user can read it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o600)


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`, however many calls it takes."""
    done = 0
    while done < data.nbytes:
        done += os.pwrite(file, data[done : done + _BLOCK], offset + done)


def write_new(path: Path, data: bytes) -> None:
    """Write the new private file `path` and wait until it is on the disk."""
    file = create_private(path)
    try:
        write_all(file, memoryview(data), 0)
        os.fsync(file)
    finally:
        os.close(file)


def sync_folder(path: Path) -> None:
    """Wait until the names in the folder `path` are on the disk."""
    if os.name != "posix":
        return
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
