"""Checkpoints of several ranks: all of them read a run, the first one writes it.

What is read may be sharded, and then has to be gathered by all ranks at the same time. So they all
walk over the same tensors in the same order, and a checkpoint does not show how many they were. If
the first rank cannot write, the walk goes on to its end, so that nobody waits for it, and all ranks
raise the error. A checkpoint is opened by all of them; the first one verifies it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from patrickstar.checkpoint import Checkpoint, has_latest, misused, open_checkpoint
from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.engine.ranks import Ranks
from patrickstar.errors import CheckpointError

Part = Callable[[], AbstractContextManager[torch.Tensor]]
"""Has a part of a tensor inside the context."""


class Walk:
    """Parts of tensors, read once each and in order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._read = 0

    def source(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[Part]
    ) -> TensorSource:
        """The next tensor of the walk."""
        self._parts += parts

        def contents() -> Iterator[torch.Tensor]:
            for part in parts:
                self._read += 1
                with part() as values:
                    yield values
                del values

        return TensorSource(name, dtype, shape, contents)

    def finish(self) -> None:
        """Read what has not been read."""
        for part in self._parts[self._read :]:
            self._read += 1
            with part():
                pass


def write_together(ranks: Ranks | None, walk: Walk, write: Callable[[], None]) -> None:
    """Call `write`, which reads the walk, on the first rank; called on all ranks.

    Raises:
        CheckpointError: it could not be written, on every rank.
    """
    if ranks is None:
        write()
        return
    failure: Exception | None = None
    if ranks.is_first:
        try:
            write()
        except Exception as error:
            failure = error
    walk.finish()
    told = "" if failure is None else str(failure) or type(failure).__name__
    texts = ranks.comm.control.exchange_bytes("the outcome of saving", told.encode())
    if failure is not None:
        raise failure
    if texts[0]:
        raise CheckpointError(f"the first rank could not save: {texts[0].decode()}")


def agreed_tag(ranks: Ranks | None, tag: str, validation: str) -> str:
    """The tag under which a checkpoint is saved: the first rank's; called on all ranks.

    Args:
        validation: what to do where tags differ: "WARN", "FAIL" or "IGNORE".

    Raises:
        CheckpointError: they differ and `validation` is "FAIL"; on every rank.
    """
    if ranks is None:
        return tag
    tags = [t.decode() for t in ranks.comm.control.exchange_bytes("checkpoint tags", tag.encode())]
    if len(set(tags)) > 1 and validation != "IGNORE":
        told = (
            f"the ranks save one checkpoint under different tags ({', '.join(sorted(set(tags)))}); "
            "give all of them the same"
        )
        if validation == "FAIL":
            raise CheckpointError(f"{told}, or set checkpoint.tag_validation to 'Warn'")
        warnings.warn(f"{told}. It is saved as {tags[0]!r}", stacklevel=3)
    return tags[0]


def open_together(ranks: Ranks | None, folder: Path, tag: str | None) -> Checkpoint:
    """Open the checkpoint `tag` of `folder`, or the latest; called on all ranks.

    Raises:
        CheckpointError: a rank cannot, or ranks see different checkpoints; on every rank.
    """
    if ranks is None:
        return open_checkpoint(folder, tag)
    with ExitStack() as stack:
        told, failure, opened = {}, None, None
        try:
            opened = stack.enter_context(open_checkpoint(folder, tag, verified=ranks.is_first))
            told = {"name": opened.path.name}
        except CheckpointError as error:
            failure, told = error, {"problem": str(error)}
        everybody = ranks.comm.control.exchange_json("the opening of a checkpoint", told)
        if failure is not None:
            raise failure
        for rank, other in zip(ranks.comm.topology.ranks, everybody, strict=True):
            if other != everybody[0] or "problem" in other:
                found = other.get("problem") or f"it finds {other['name']!r}"
                raise CheckpointError(
                    f"the ranks cannot go on from one checkpoint in {str(folder)!r}: rank {rank} "
                    f"says: {found}. Give a folder that all ranks see, or the tag"
                )
        assert opened is not None
        stack.pop_all()
        return opened


def is_there(ranks: Ranks | None, folder: Path) -> bool:
    """Whether some rank finds a latest checkpoint in `folder`; called on all ranks.

    Raises:
        CheckpointError: on all ranks, if none does and on some there are checkpoints all the same.
    """
    found = has_latest(folder)
    why = None if found else misused(folder)
    anywhere, missed = (found, why is not None)
    if ranks is not None:
        anywhere, missed = ranks.anywhere([anywhere, missed])
    if missed and not anywhere:
        raise CheckpointError(why or f"another rank finds {str(folder)!r} without a latest one")
    return anywhere
