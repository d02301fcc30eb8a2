"""Writing a folder whole, or leaving what was there.

A folder cannot be replaced by another one in one step. The old one steps aside for the moment of
the exchange; who was killed in that moment left it there, and `recover` brings it back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder to write, which takes the place of `target` when it is complete."""
    recover(target)
    beside, before = _beside(target, "new"), _beside(target, "old")
    for left in (beside, before):
        _remove(left)
    beside.mkdir(parents=True)
    try:
        yield beside
        if target.exists() or target.is_symlink():
            target.replace(before)
        beside.replace(target)
        _remove(before)
    finally:
        _remove(beside)


def recover(target: Path) -> None:
    """Bring back what stepped aside for a folder that never came."""
    before = _beside(target, "old")
    if not target.exists() and before.exists():
        before.replace(target)


def _beside(target: Path, which: str) -> Path:
    return target.with_name(f".{target.name}.{which}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
