"""Pages are recycled, addresses stay, nothing outlives its owner."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from patrickstar.memory.arena import PAGE, Buffer, PageArena

MIB = 1 << 20


def mappings(buffer: Buffer) -> list[tuple[int, int]]:
    """The mappings of the system, cut to the buffer."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            start, end = max(start, buffer.address), min(end, buffer.address + buffer.nbytes)
            if start < end:
                found.append((start, end))
    return found


class OneMappingAtATime:
    """The C library as it is on kernels that refuse a move across mappings (before Linux 6.17)."""

    def __init__(self, libc: Any) -> None:
        self._libc = libc
        self.moves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libc, name)

    def mremap(self, source: int, size: int, new_size: int, flags: int, target: int) -> Any:
        around = mappings(Buffer(source, size, torch.UntypedStorage(0)))
        if around != [(source, source + size)]:
            ctypes.set_errno(14)
            return ctypes.c_void_p(-1).value
        self.moves += 1
        return self._libc.mremap(source, size, new_size, flags, target)


class NoMoving(OneMappingAtATime):
    """A system that refuses every move, and has unmapped the target by then, as kernels do."""

    def mremap(self, source: int, size: int, new_size: int, flags: int, target: int) -> Any:
        self._libc.munmap(target, size)
        return ctypes.c_void_p(-1).value


def fill(buffer: Buffer, value: int) -> torch.Tensor:
    return buffer.tensor(torch.uint8, buffer.nbytes).fill_(value)


def holds(buffer: Buffer, value: int) -> bool:
    tensor = buffer.tensor(torch.uint8, buffer.nbytes)
    return int(tensor.min()) == int(tensor.max()) == value  # without a temporary of its size


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE


@pytest.fixture
def arena() -> Iterator[PageArena]:
    arena = PageArena()
    if not arena._moves_pages:
        pytest.skip("this system cannot move pages between mappings")
    yield arena
    arena.trim()


def test_reserving_takes_no_memory() -> None:
    arena, before = PageArena(), rss()
    buffers = [arena.reserve(256 * MIB) for _ in range(16)]
    assert rss() - before < 8 * MIB
    assert arena.committed_bytes == arena.parked_bytes == 0
    assert all(b.address % (2 * MIB) == 0 for b in buffers), "large buffers suit huge pages"


def test_a_buffer_is_a_whole_number_of_pages() -> None:
    arena = PageArena()
    assert [arena.reserve(n).nbytes for n in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]


def test_recycled_pages_are_not_faulted_in_again(arena: PageArena) -> None:
    first, second = arena.reserve(8 * MIB), arena.reserve(8 * MIB)
    arena.commit(first)
    fill(first, 1)
    for _ in range(10):
        before = faults()
        arena.decommit(first)
        arena.commit(second)
        fill(second, 2)
        assert faults() - before < 16, "8 MiB of fresh pages are 2,048 faults, or 4 huge ones"
        arena.decommit(second)
        arena.commit(first)


def test_a_buffer_that_comes_back_first_finds_its_own_pages(arena: PageArena) -> None:
    first, second = arena.reserve(MIB), arena.reserve(MIB)
    for buffer in (first, second):
        arena.commit(buffer)
        fill(buffer, 5)
    arena.decommit(second)
    arena.decommit(first)
    before = faults()
    arena.commit(first)
    assert holds(first, 5)
    assert faults() - before < 128, "1 MiB of fresh pages are 256 faults"


def test_views_made_once_see_what_is_there_now(arena: PageArena) -> None:
    buffers = [arena.reserve(MIB) for _ in range(3)]
    views = [buffer.tensor(torch.int32, 100, offset=7) for buffer in buffers]
    addresses = [view.data_ptr() for view in views]
    for round in range(4):
        for buffer, view in zip(buffers, views, strict=True):
            arena.commit(buffer)
            buffer.tensor(torch.int32, MIB // 4).fill_(round)
            assert view.eq(round).all()
            arena.decommit(buffer)
    assert addresses == [view.data_ptr() for view in views]
    assert arena.parked_bytes <= MIB, "one buffer's pages served them all"


def test_zeroed_buffers_are_zero_wherever_their_pages_come_from(arena: PageArena) -> None:
    large, small = arena.reserve(3 * PAGE), arena.reserve(2 * PAGE)
    arena.commit(small)
    fill(small, 9)
    arena.decommit(small)
    arena.commit(large, zero=True)  # two recycled pages and a fresh one
    assert holds(large, 0)
    fill(large, 9)
    arena.decommit(large)
    arena.commit(large, zero=True)
    assert holds(large, 0)


@pytest.mark.parametrize("libc", [OneMappingAtATime, NoMoving])
def test_buffers_of_many_sizes_exchange_pages_and_keep_their_contents(
    arena: PageArena, libc: Any
) -> None:
    arena._libc = libc(arena._libc)
    rng = random.Random(0)
    buffers = [arena.reserve(rng.randint(1, 9) * PAGE) for _ in range(40)]
    expected: dict[int, int] = {}
    for step in range(600):
        buffer = rng.choice(buffers)
        if buffer.committed:
            assert holds(buffer, expected[buffer.address])
            arena.decommit(buffer)
        elif sum(b.committed for b in buffers) < 20:
            arena.commit(buffer)
            expected[buffer.address] = step % 251
            fill(buffer, step % 251)
        if step % 50 == 0:
            arena.trim(keep=rng.randint(0, 40) * PAGE)
        assert arena.committed_bytes == sum(b.nbytes for b in buffers if b.committed)
    for buffer in buffers:
        cuts = {start - buffer.address for start, _ in mappings(buffer)} - {0}
        assert cuts <= set(buffer.cuts), "a cut that is not known would be moved across"
        assert len(mappings(buffer)) <= buffer.nbytes // PAGE
    if libc is OneMappingAtATime:
        assert arena._libc.moves > 200
        assert arena._moves_pages, "the system refused a move"
    else:
        assert not arena._moves_pages
        assert arena.parked_bytes == 0


def test_buffers_of_one_size_are_never_cut(arena: PageArena) -> None:
    small = [arena.reserve(PAGE) for _ in range(8)]
    large = [arena.reserve(8 * PAGE) for _ in range(8)]
    rng = random.Random(1)
    for _ in range(500):
        for kind in (small, large):
            for buffer in rng.sample(kind, 4):
                arena.commit(buffer)
        for buffer in (*small, *large):
            if buffer.committed:
                arena.decommit(buffer)
        assert not any(buffer.cuts for buffer in large)


def test_a_much_cut_buffer_gets_a_fresh_mapping(arena: PageArena) -> None:
    pages = [arena.reserve(PAGE) for _ in range(100)]
    large = arena.reserve(100 * PAGE)
    for page in pages:
        arena.commit(page)
    for page in pages:
        arena.decommit(page)
    arena.commit(large)
    fill(large, 3)
    assert len(large.cuts) == 99
    arena.decommit(large)
    assert large.cuts == []
    assert len(mappings(large)) == 1
    assert arena.parked_bytes == 0


def test_huge_pages_stay_whole_between_buffers_of_odd_sizes(arena: PageArena) -> None:
    """Direct I/O into ordinary pages is about half as fast."""
    sizes = [4 * MIB + PAGE, 6 * MIB + 3 * PAGE, 8 * MIB, 5 * MIB]
    buffers = [arena.reserve(size) for size in sizes * 3]
    rng = random.Random(2)
    for step in range(200):
        for buffer in rng.sample(buffers, 4):
            arena.commit(buffer, zero=step % 7 == 0)
            fill(buffer, step)
        for buffer in buffers:
            if buffer.committed:
                assert holds(buffer, step)
                arena.decommit(buffer)
        arena.trim(keep=rng.randint(8 * MIB, 24 * MIB))
    for buffer in buffers:
        assert all(cut % (2 * MIB) == 0 for cut in buffer.cuts if cut < buffer.whole)


def test_pages_of_one_kind_do_not_hold_up_the_trimming_of_the_other(arena: PageArena) -> None:
    huge, small = arena.reserve(4 * MIB), arena.reserve(8 * PAGE)
    for buffer in (huge, small):
        arena.commit(buffer)
        fill(buffer, 1)
    for buffer in (huge, small):
        arena.decommit(buffer)
    assert arena.trim(keep=3 * MIB) == 2 * MIB + 8 * PAGE
    assert arena.trim() == 2 * MIB
    arena.commit(huge, zero=True)
    assert holds(huge, 0)


def test_trimming_gives_memory_back_to_the_system(arena: PageArena) -> None:
    buffers = [arena.reserve(16 * MIB) for _ in range(4)]
    for buffer in buffers:
        arena.commit(buffer)
        fill(buffer, 1)
    full = rss()
    for buffer in buffers:
        arena.decommit(buffer)
    assert arena.parked_bytes == 64 * MIB
    assert rss() > full - 8 * MIB, "parked pages are still held"
    assert arena.trim(keep=24 * MIB) == 40 * MIB
    assert arena.parked_bytes == 24 * MIB
    assert abs(full - rss() - 40 * MIB) < 4 * MIB
    assert arena.trim() == 24 * MIB
    assert abs(full - rss() - 64 * MIB) < 4 * MIB
    assert arena.trim() == 0


def test_a_partly_trimmed_buffer_is_committed_in_full(arena: PageArena) -> None:
    first, second = arena.reserve(4 * PAGE), arena.reserve(4 * PAGE)
    for keep in range(4):
        arena.commit(first)
        fill(first, 7)
        arena.decommit(first)
        arena.trim(keep=keep * PAGE)
        arena.commit(second, zero=True)
        assert holds(second, 0)
        arena.discard(second)
        second = arena.reserve(4 * PAGE)


def test_without_moving_pages_everything_works_and_nothing_is_parked() -> None:
    arena = PageArena()
    arena._moves_pages = False
    first, second = arena.reserve(MIB), arena.reserve(MIB)
    before = rss()
    for _ in range(3):
        for buffer in (first, second):
            arena.commit(buffer, zero=True)
            assert holds(buffer, 0)
            fill(buffer, 4)
            arena.decommit(buffer)
            assert arena.parked_bytes == 0
    assert rss() - before < MIB


def test_tensors_outlive_the_arena() -> None:
    arena = PageArena()
    buffer = arena.reserve(MIB)
    arena.commit(buffer)
    tensor = fill(buffer, 6)
    del arena, buffer
    gc.collect()
    assert tensor.eq(6).all()


def test_address_space_is_given_back_with_the_last_tensor(arena: PageArena) -> None:
    buffer = arena.reserve(64 * MIB)
    view = buffer.tensor(torch.uint8, 10)
    place = Buffer(buffer.address, buffer.nbytes, torch.UntypedStorage(0))
    arena.commit(buffer)
    arena.discard(buffer)
    del buffer
    gc.collect()
    assert mappings(place) == [(place.address, place.address + place.nbytes)]
    del view
    gc.collect()
    # Something else may be mapped there by now, but not the whole.
    assert mappings(place) != [(place.address, place.address + place.nbytes)]


def test_touching_a_decommitted_buffer_is_a_fault_and_not_another_chunks_bytes() -> None:
    program = """
        import torch
        from patrickstar.memory.arena import PageArena
        arena = PageArena()
        buffer = arena.reserve(4096)
        arena.commit(buffer)
        tensor = buffer.tensor(torch.uint8, 4096)
        tensor.fill_(1)
        arena.decommit(buffer)
        print("touching", flush=True)
        tensor.sum()
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert run.stdout == "touching\n"
    assert run.returncode == -signal.SIGSEGV


def in_child(action: Any) -> int:
    """The exit status of a forked child that ran `action`; negative when a signal ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # As a data loader's worker does: the threads of OpenMP did not come along.
            torch.set_num_threads(1)
            action()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_finds_buffers_empty_and_cannot_change_them(arena: PageArena) -> None:
    first, second = arena.reserve(MIB), arena.reserve(MIB)
    arena.commit(first)
    fill(first, 1)
    arena.decommit(first)
    arena.commit(second)  # over pages that were moved
    fill(second, 2)

    def child() -> None:
        assert holds(second, 0)
        fill(second, 3)
        arena.decommit(second)
        arena.commit(first)
        fill(first, 4)

    assert in_child(child) == 0
    assert holds(second, 2)
    assert not first.committed


def test_a_forked_child_that_drops_a_buffer_unmaps_nothing_of_its_own() -> None:
    arena = PageArena()
    held = [arena.reserve(MIB)]
    arena.commit(held[0])
    place = held[0].address

    def child() -> None:
        # The child has nothing there, so its own memory may well get this place.
        libc = arena._libc
        assert libc.mmap(place, MIB, 3, 0x32, -1, 0) == place  # fixed, private, anonymous
        ctypes.memset(place, 7, MIB)
        held.clear()
        gc.collect()
        assert ctypes.string_at(place, MIB) == b"\x07" * MIB

    assert in_child(child) == 0


def test_refused_memory_leaves_the_books_right(arena: PageArena) -> None:
    class NoProtecting(OneMappingAtATime):
        def mprotect(self, address: int, nbytes: int, protection: int) -> int:
            ctypes.set_errno(12)
            return -1

    buffer = arena.reserve(MIB)
    libc = arena._libc
    arena._libc = NoProtecting(libc)
    with pytest.raises(MemoryError, match="no memory for a buffer of 1048576"):
        arena.commit(buffer)
    assert arena.committed_bytes == arena.parked_bytes == 0
    arena._libc = libc
    arena.commit(buffer, zero=True)
    assert holds(buffer, 0)
