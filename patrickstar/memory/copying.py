"""The ways between tiers.

A copy is *prepared* on the caller's thread, when both tiers have a place for the chunk, and *made*
on a transfer thread. Between the two the host goes on; an accelerator may still be computing what
is to be copied, or reading what lay in the target before, so what has to be waited for is noted
when the copy is prepared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.tiers import CpuTier, DiskTier, Tier


@runtime_checkable
class Addressed(Protocol):
    """A tier whose chunks lie in CPU memory."""

    def view(self, chunk: int, nbytes: int) -> memoryview: ...


def prepare_copy(chunk: int, nbytes: int, source: Tier, target: Tier) -> Callable[[], None]:
    """What copies the `nbytes` bytes of `chunk` from one tier to another, complete on return."""
    if isinstance(source, AcceleratorTier) and isinstance(target, Addressed):
        return source.saving(chunk, lambda: target.view(chunk, nbytes))
    if isinstance(source, Addressed) and isinstance(target, AcceleratorTier):
        return target.loading(chunk, lambda: source.view(chunk, nbytes))
    if isinstance(source, Addressed) and isinstance(target, DiskTier):
        return lambda: target.spool.write(target.slots[chunk], source.view(chunk, nbytes))
    if isinstance(source, DiskTier) and isinstance(target, Addressed):
        return lambda: source.spool.read(source.slots[chunk], target.view(chunk, nbytes))
    if isinstance(source, CpuTier) and isinstance(target, CpuTier):
        from_, to = source.buffer(chunk, nbytes), target.buffer(chunk, nbytes)
        return lambda: _move(to.address, from_.address, nbytes)
    raise AssertionError(f"no way from {source.name} to {target.name}")


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)
