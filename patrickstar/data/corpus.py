"""Text to train on, as bytes: a file, a folder, or the Python sources that are on every machine.

Tokens are bytes, so there is no tokenizer and nothing to download. A corpus is one compact uint8
tensor: files in the order of their names, a zero byte after each, up to a limit, because what is
read here comes out of the same memory that the budgets share out.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from patrickstar.errors import DataError

CORPUS_LIMIT = 16 << 20  # bytes
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on.

    Attributes:
        tokens: uint8 [bytes].
        source: what it was made of, for people.
        files: how many files are in it, the last one perhaps in part.
        left_out: bytes that the limit kept out.
    """

    tokens: torch.Tensor
    source: str
    files: int
    left_out: int


def load_corpus(path: str | os.PathLike[str] | None = None, limit: int = CORPUS_LIMIT) -> Corpus:
    """Read a file, all files under a folder (hidden ones aside), or the standard library's sources.

    Args:
        path: a file or folder; None for the Python standard library of this machine.
        limit: most bytes to keep.

    Raises:
        DataError: the path does not exist or is neither file nor folder, the folder has no files,
            or one cannot be read.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _walk(root, _NOT_LIBRARY) if f.suffix == ".py"]
        source = "the Python standard library"
        if not files:
            raise DataError(
                f"{root} has no Python source files (this Python came without them); "
                "give text to train on with --data FILE_OR_FOLDER"
            )
    else:
        source = os.fspath(path)
        root = Path(path)
        files = list(_walk(root)) if _is_folder(source) else [root]
        if not files:
            raise DataError(f"the data folder {source!r} has no files; give one that has text")
    return _read(files, source, limit)


def _is_folder(path: str) -> bool:
    """Whether `path` is a folder; refused if it is no file either."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise DataError(
            f"the data path {path!r} does not exist; give a file or a folder"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"the data path {path!r} cannot be used ({why}); give a file or a folder"
        ) from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise DataError(
            f"the data path {path!r} is neither a file nor a folder but a device, pipe or socket; "
            "write what comes out of it to a file first"
        )
    return stat.S_ISDIR(mode)


def _walk(root: Path, skipped: Iterable[str] = ()) -> Iterator[Path]:
    """The regular files under `root` in the order of their names."""

    def refuse(error: OSError) -> None:
        raise DataError(
            f"the data folder {str(error.filename)!r} cannot be read ({error.strerror}); "
            "check its permissions"
        ) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read(files: list[Path], source: str, limit: int) -> Corpus:
    sizes = [_size(path) for path in files]
    buffer = bytearray(min(limit, sum(size + 1 for size in sizes)))
    view = memoryview(buffer)
    filled = used = left_out = 0
    for path, size in zip(files, sizes, strict=True):
        room = len(buffer) - filled
        left_out += max(0, size - room)
        if room == 0 or size == 0:
            continue
        try:
            with path.open("rb", buffering=0) as file:
                filled += file.readinto(view[filled : filled + size]) or 0
        except OSError as error:
            raise _unreadable(path, error) from error
        used += 1
        filled = min(filled + 1, len(buffer))  # the zero that ends a file
    tokens = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0).byte()
    return Corpus(tokens[:filled], source, used, left_out)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"the data file {str(path)!r} cannot be read ({error.strerror}); "
        "check its permissions, or leave it out"
    )
