"""The double itself: what misses a wait is seen."""

from __future__ import annotations

import pytest
import torch

from patrickstar.memory.streams import StreamCopies

accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = pytest.mark.skipif(
    accelerator is None or accelerator.type != "late", reason="needs the double: make accelerator"
)


def computed() -> torch.Tensor:
    """Threes on the device, which are not there before somebody waits for them."""
    made = torch.zeros(1000, device="late")
    for _ in range(3):
        made.add_(1)
    return made


def test_a_copy_on_another_stream_that_does_not_wait_gets_what_was_there_before() -> None:
    computed()  # the first time, operators are waited for
    source, target = computed(), torch.empty(1000).pin_memory()
    stream, done = torch.Stream(device="late"), torch.Event(device="late")
    with stream:
        target.copy_(source, non_blocking=True)
        done.record(stream)
    done.synchronize()
    assert not target.eq(3).all()
    torch.accelerator.synchronize()
    assert source.eq(3).all()


def test_our_copies_wait_for_what_was_queued_before_their_mark() -> None:
    computed()
    source, target = computed(), torch.empty(1000).pin_memory()
    copies = StreamCopies(torch.device("late", 0))
    copies.copy(target, source, copies.mark())
    assert target.eq(3).all()


def test_memory_that_is_freed_is_not_read_again_by_chance() -> None:
    seen = torch.ones(1000, device="late").as_strided((1000,), (1,))
    torch.accelerator.synchronize()
    host = torch.empty(1000).pin_memory()
    stream = torch.Stream(device="late")
    stream.wait_stream(torch.accelerator.current_stream())
    with stream:
        host.copy_(seen, non_blocking=True)  # without record_stream
    del seen
    torch.accelerator.current_stream().synchronize()
    stream.synchronize()
    assert host.isnan().all()


def test_pytorch_counts_the_devices_and_keeps_their_random_state() -> None:
    assert torch.accelerator.device_count() >= 1
    state = torch.get_device_module("late").get_rng_state(0)
    first = torch.rand(3, device="late")
    torch.get_device_module("late").set_rng_state(state, 0)
    assert torch.rand(3, device="late").equal(first)
