"""A folder of checkpoints, in which the last complete one can always be found.

    DIR/
      latest                      the tag of the newest complete checkpoint
      global_step20/              a complete checkpoint
      .global_step30.tmp-x7f2/    one that is being written, or whose writing was killed

A checkpoint is written beside the others under a name nobody can guess, made durable file by file,
and renamed; `latest` follows last, by a rename of its own. So a kill at any moment leaves what was
there before or what is there after. Saving under a tag that exists exchanges the two folders in one
step where the system can do that; elsewhere the old one is first moved aside to `.TAG.replaced`,
where loading still finds it.

What killed saves left behind is removed by the next save: whoever is writing holds a lock on the
temporary folder, so what is not locked is nobody's any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from patrickstar.checkpoint import manifest
from patrickstar.checkpoint.paths import check_name, read_small, sync_folder, write_new
from patrickstar.errors import CheckpointError, SpoolError

LATEST = "latest"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextmanager
def new_checkpoint(
    folder: Path, tag: str, keep: int | None = None, *, latest: bool = True
) -> Iterator[Path]:
    """A temporary folder to write a checkpoint into; at the end it becomes `folder/tag`.

    If the body raises, everything is as it was before.

    Args:
        keep: how many checkpoints there are at most afterwards; older ones are removed. None keeps
            all.
        latest: whether it becomes the latest.

    Raises:
        CheckpointError: the tag is no plain name, or the disk is full or failed.
    """
    check_name(tag, "the tag")
    if tag == LATEST:
        raise CheckpointError(f"a checkpoint cannot have the tag {tag!r}; choose another")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep} would remove the checkpoint itself; use 1 or more")
    with beside(folder, tag) as temporary:
        yield temporary
        # Written where nobody looks yet; a rename is all that is left to do then.
        if latest:
            write_new(temporary / LATEST, f"{tag}\n".encode())
        sync_folder(temporary)
        _move_into_place(temporary, folder / tag)
        if latest:
            os.replace(folder / tag / LATEST, folder / LATEST)
        sync_folder(folder)
    if keep is not None:
        _remove_old(folder, tag, keep)


@contextmanager
def beside(folder: Path, name: str) -> Iterator[Path]:
    """A private temporary folder in `folder`, which is made if need be; gone at the end.

    Raises:
        CheckpointError: for any failure of the disk inside.
    """
    try:
        _make_folder(folder)
        _remove_leftovers(folder)
        # 0700, and not to be guessed.
        temporary = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=folder))
        try:
            with _locked(temporary):
                yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except SpoolError:  # what was to be read, not what was to be written
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += "; free some space, or keep fewer checkpoints with keep="
        raise CheckpointError(
            f"{name!r} could not be written to {str(folder)!r}: {reason}. "
            "The checkpoints that were there before are as they were"
        ) from error


def move_files(temporary: Path, folder: Path, names: Sequence[str]) -> None:
    """Move complete files from a temporary folder into `folder`, each in one step, in order."""
    for name in names:
        os.replace(temporary / name, folder / name)
    sync_folder(folder)


def has_latest(folder: Path) -> bool:
    """Whether `folder` says which checkpoint is the newest."""
    return (folder / LATEST).is_file()


def find(folder: Path, tag: str | None) -> Path:
    """The folder of checkpoint `tag`, or of the newest one.

    Raises:
        CheckpointError: there is none; the message says which there are.
    """
    if tag is None:
        tag = read_latest(folder)
    check_name(tag, "the tag")
    for path in (folder / tag, folder / f".{tag}.replaced"):
        if path.is_dir():
            return path
    there = ", ".join(sorted(p.name for p in complete(folder))) or "none"
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {str(folder)!r}; there are: {there[:500]}"
    )


def read_latest(folder: Path) -> str:
    """The tag in `latest`."""
    path = folder / LATEST
    if not path.exists():
        there = ", ".join(sorted(p.name for p in complete(folder))) or "none"
        raise CheckpointError(
            f"there is no file 'latest' in {str(folder)!r}, so it says no newest checkpoint; "
            f"name one by its tag. There are: {there[:500]}"
        )
    text = read_small(path, 4096).decode("utf-8", "replace")
    return check_name(text.strip(), f"the tag in {str(path)!r}")


def next_sequence(folder: Path) -> int:
    """A number larger than that of every checkpoint in `folder`."""
    return 1 + max((_sequence(path) for path in complete(folder)), default=0)


def _make_folder(folder: Path) -> None:
    """Make `folder`, private, and the folders it lies in."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`; none where it cannot be read."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    return [
        p
        for p in entries
        if not p.name.startswith(".") and not p.is_symlink() and (p / manifest.NAME).is_file()
    ]


def _sequence(path: Path) -> int:
    try:
        return manifest.read_manifest(path).sequence
    except CheckpointError:
        return 0


def _remove_old(folder: Path, tag: str, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints. One that cannot be read is not ours to judge.

    A failure is no reason to call the save failed, which is complete; the next save tries again.
    """
    ours = [(_sequence(path), path) for path in complete(folder) if path.name != tag]
    ours = sorted((entry for entry in ours if entry[0]), key=lambda entry: entry[0])
    for _, path in ours[: max(0, len(ours) - (keep - 1))]:
        with contextlib.suppress(OSError):
            # Gone in one step for anyone who looks; removing the files takes time.
            doomed = Path(tempfile.mkdtemp(prefix=f".{path.name}.tmp-", dir=folder))
            os.rename(path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed saves left: temporary folders that nobody holds a lock on."""
    for path in folder.glob(".*.tmp-*"):
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                with _locked(path):
                    shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.replaced"):
        tag = path.name[1 : -len(".replaced")]
        if (folder / tag / manifest.NAME).is_file():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock; BlockingIOError if another process holds it."""
    try:
        import fcntl
    except ImportError:  # a system without it: leftovers cannot be told from work in progress
        raise OSError(errno.ENOTSUP, "no file locks") from None
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def _move_into_place(temporary: Path, final: Path) -> None:
    exchange = _exchange_call()
    if not final.exists():
        os.rename(temporary, final)
    elif exchange is not None and exchange(temporary, final):
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        aside = final.with_name(f".{final.name}.replaced")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
        os.rename(temporary, final)
        sync_folder(final.parent)
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(final.parent)


def _exchange_call() -> Callable[[Path, Path], bool] | None:
    """Exchange two names in one step (Linux); the result says whether it could be done."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return None

    def exchange(one: Path, other: Path) -> bool:
        names = os.fsencode(one), os.fsencode(other)
        status = call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
        return int(status) == 0

    return exchange
