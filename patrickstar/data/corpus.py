"""Text to train on, as bytes: a file, a folder, or the Python sources that are on every machine.

Tokens are bytes, so there is no tokenizer and nothing to download. A corpus is one compact uint8
tensor: files in the order of their names, a zero byte after each, up to a limit, because what is
read here comes out of the same memory that the budgets share out.
"""

from __future__ import annotations

import os
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
        DataError: the path does not exist, the folder has no files, or one cannot be read.
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
        root = Path(path)
        source = str(root)
        if not root.exists():
            raise DataError(f"the data path {source!r} does not exist; give a file or a folder")
        files = list(_walk(root)) if root.is_dir() else [root]
        if not files:
            raise DataError(f"the data folder {source!r} has no files; give one that has text")
    return _read(files, source, limit)


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
    buffer = bytearray(min(limit, sum(f.stat().st_size + 1 for f in files)))
    view = memoryview(buffer)
    filled = used = left_out = 0
    for path in files:
        size = path.stat().st_size
        room = len(buffer) - filled
        left_out += max(0, size - room)
        if room == 0 or size == 0:
            continue
        try:
            with path.open("rb", buffering=0) as file:
                filled += file.readinto(view[filled : filled + size]) or 0
        except OSError as error:
            raise DataError(
                f"the data file {str(path)!r} cannot be read ({error.strerror}); "
                "check its permissions, or leave it out"
            ) from error
        used += 1
        filled = min(filled + 1, len(buffer))  # the zero that ends a file
    tokens = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0).byte()
    return Corpus(tokens[:filled], source, used, left_out)
