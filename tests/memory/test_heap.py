"""Free heap pages go back to the system when the process outgrows its budget, and not before."""

from __future__ import annotations

import os

import pytest
import torch

from patrickstar.memory.heap import ProcessHeap, give_back_free_pages, keep_free_pages

MIB = 1 << 20


class Watched(ProcessHeap):
    """A heap of a process whose size a test decides."""

    def __init__(self) -> None:
        self.size = 0
        self.in_use = 0
        self.trims = 0
        super().__init__()
        self._trim = self.trim

    def _resident(self) -> int:
        return self.size

    def trim(self, _: int) -> None:
        self.trims += 1
        self.size = self.in_use


@pytest.fixture
def heap() -> Watched:
    return Watched()


def test_nothing_is_given_back_within_the_limit(heap: Watched) -> None:
    heap.size = 1000 * MIB
    heap.keep_within(1000 * MIB)
    assert heap.trims == 0


def test_free_pages_are_given_back_beyond_the_limit(heap: Watched) -> None:
    heap.size, heap.in_use = 1200 * MIB, 500 * MIB
    heap.keep_within(1000 * MIB)
    assert heap.trims == 1
    assert heap.size == 500 * MIB


def test_what_is_about_to_be_allocated_counts_already(heap: Watched) -> None:
    heap.size, heap.in_use = 1100 * MIB, 900 * MIB
    heap.keep_within(1000 * MIB, 50 * MIB)
    assert heap.trims == 0
    heap.keep_within(1000 * MIB, 200 * MIB)
    assert heap.trims == 1


def test_what_is_in_use_is_not_trimmed_again_and_again(heap: Watched) -> None:
    heap.size = heap.in_use = 1500 * MIB
    for _ in range(10):
        heap.keep_within(1000 * MIB)
    assert heap.trims == 1
    heap.size += 100 * MIB
    heap.keep_within(1000 * MIB)
    assert heap.trims == 2


def test_what_is_in_use_beyond_the_limit_does_not_add_to_what_is_let_pass(heap: Watched) -> None:
    heap.size = heap.in_use = 1180 * MIB
    heap.keep_within(1000 * MIB)  # nothing to give back
    heap.size = 1200 * MIB
    heap.keep_within(1000 * MIB)
    assert heap.size == 1180 * MIB


def test_a_peak_of_long_ago_does_not_excuse_free_pages(heap: Watched) -> None:
    heap.size = heap.in_use = 3000 * MIB
    heap.keep_within(1000 * MIB)
    heap.size = heap.in_use = 500 * MIB
    heap.keep_within(1000 * MIB)
    heap.size = 2000 * MIB
    heap.keep_within(1000 * MIB)
    assert heap.trims == 2
    assert heap.size == 500 * MIB


def test_real_heap_pages_go_back() -> None:
    heap = ProcessHeap()
    if heap._trim is None:
        pytest.skip("this C library keeps its heap to itself")
    # Small enough for the heap proper; the last one keeps the others from the top of it.
    tensors = [torch.ones(16 << 10) for _ in range(8000)]
    last = tensors.pop()
    tensors.clear()
    heap.keep_within(16 * MIB)
    assert heap._resident() - heap._start < 64 * MIB
    assert last.sum() == 16 << 10
    heap.close()


def test_freed_pages_are_kept_for_the_next_tensor_until_they_are_given_back() -> None:
    if not keep_free_pages({}):
        pytest.skip("this C library does not let its heap be set up")
    heap = ProcessHeap()
    for _ in range(3):
        tensor = torch.ones(24 * MIB // 4)
        del tensor
    kept = heap._resident() - heap._start
    give_back_free_pages()
    assert kept > 16 * MIB > heap._resident() - heap._start
    heap.close()


@pytest.mark.parametrize(
    "chosen",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096"}],
)
def test_what_the_user_set_up_is_left_alone(chosen: dict[str, str]) -> None:
    assert not keep_free_pages(chosen)


def test_closing_frees_the_file_handle() -> None:
    before = len(os.listdir("/proc/self/fd"))
    heap = ProcessHeap()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    heap.close()
    heap.close()
    assert len(os.listdir("/proc/self/fd")) == before
    heap.keep_within(0)
