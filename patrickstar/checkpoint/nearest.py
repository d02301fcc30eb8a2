"""Where a checkpoint was looked for in vain: what is there instead, and what was probably meant.

A script that goes on if there is something to go on from must be able to run for the first time, so
a folder that is missing, empty or somebody else's is no error. It is one where checkpoints lie that
the call has missed: training anew beside them would be what nobody meant.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path

from patrickstar.checkpoint import manifest
from patrickstar.checkpoint.folder import complete, has_latest

_MOST = 1000  # entries of a folder that are looked at
_ALIKE = 0.6  # of `difflib`: one letter, or an ending, is different


def misused(folder: Path) -> str | None:
    """Why loading the latest checkpoint of `folder`, which says of none, cannot be meant."""
    if folder.is_file():
        return f"{str(folder)!r} is a file; give the folder that save_checkpoint was given"
    if (folder / manifest.NAME).is_file():
        return (
            f"{str(folder)!r} is a checkpoint itself; give the folder it lies in and its tag: "
            f"load_checkpoint({str(folder.parent)!r}, {folder.name!r})"
        )
    there = sorted(path.name for path in complete(folder))
    if there:
        return (
            f"there is no file 'latest' in {str(folder)!r}, so it says no newest checkpoint; name "
            f"one by its tag, load_checkpoint({str(folder)!r}, {there[-1]!r}). There are: "
            f"{', '.join(there)[:500]}"
        )
    return None


def nothing_there(folder: Path) -> str:
    """What is said when nothing is loaded from `folder`, with what was probably meant."""
    what = f"there is no folder {str(folder)!r}"
    if folder.is_dir():
        what = f"there is no file 'latest' in {str(folder)!r}"
    meant = None
    with contextlib.suppress(OSError):  # a folder beside it that this user may not read
        meant = nearest(folder)
    asked = "" if meant is None else f" Did you mean {str(meant)!r}, which has checkpoints?"
    return f"{what}: NOTHING IS LOADED, and training starts anew.{asked}"


def nearest(folder: Path) -> Path | None:
    """The folder with a latest checkpoint that `folder` most likely stands for, if there is one."""
    inside = [path for path in _folders(folder) if has_latest(path)]
    if inside:
        return max(inside, key=lambda path: (path / "latest").stat().st_mtime)
    above = folder
    while not above.exists() and above != above.parent:
        above = above.parent
    if above != folder and has_latest(above):
        return above
    place = folder.parent if folder.exists() else above
    names = {path.name: path for path in _folders(place) if path != folder and has_latest(path)}
    wanted = folder.relative_to(place).parts[0] if place in folder.parents else folder.name
    alike = difflib.get_close_matches(wanted, names, n=1, cutoff=_ALIKE)
    return names[alike[0]] if alike else None


def _folders(folder: Path) -> Iterator[Path]:
    try:
        for _, path in zip(range(_MOST), folder.iterdir(), strict=False):
            if path.is_dir():
                yield path
    except OSError:
        return
