"""A checkpoint that a thread writes, under interrupts that come anywhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch

from patrickstar.checkpoint.background import BackgroundCheckpoint
from patrickstar.checkpoint.tensor_file import TensorSource
from tests.interrupts import interrupted_at

PARTS, SIZE = 4, 64


def begin(folder: Path, tag: str) -> BackgroundCheckpoint:
    sources = [TensorSource("w", torch.float32, (PARTS * SIZE,), lambda: iter(()))]
    # So little may wait that every part waits for the one before it.
    return BackgroundCheckpoint(folder, tag, sources, [], {}, waiting_bytes=SIZE)


def hand_over(checkpoint: BackgroundCheckpoint) -> None:
    for part in range(PARTS):
        checkpoint.put("w", part * SIZE, torch.full((SIZE,), float(part)))


@pytest.mark.timeout(120)
def test_an_interrupt_anywhere_while_parts_are_handed_over_leaves_one_that_ends(
    tmp_path: Path,
) -> None:
    checkpoint = begin(tmp_path, "counted")
    with interrupted_at(None, "checkpoint") as lines:
        hand_over(checkpoint)
    checkpoint.complete()
    checkpoint.wait()
    assert lines.seen >= 5 * PARTS
    for place in range(lines.seen):
        checkpoint = begin(tmp_path, f"at{place}")
        with suppress(KeyboardInterrupt), interrupted_at(place, "checkpoint"):
            hand_over(checkpoint)
        hand_over(checkpoint)  # as one whose caller caught it and began again
        if place % 2:
            checkpoint.complete()
            checkpoint.wait()
        else:
            checkpoint.abandon()
    made = {entry.name for entry in tmp_path.iterdir() if entry.is_dir()}
    assert made == {"counted", *(f"at{place}" for place in range(1, lines.seen, 2))}
