"""What is let go of, against looking at every moment and every gap each time."""

from __future__ import annotations

import numpy as np
import pytest

from patrickstar.memory.gaps import Gaps, find_gaps
from patrickstar.memory.packing import Bools, Floats, Packing
from patrickstar.memory.relief import Relief
from tests.memory.traces import gpt_trace, random_trace


def gaps_of(seed: int) -> Gaps:
    trace, sizes = gpt_trace(3) if seed < 0 else random_trace(seed)
    return find_gaps(0, [moment.uses for moment in trace.moments], trace.moments, sizes)


def sums(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(np.concatenate((values, values)))))


def plainly(packing: Packing, forced: Bools, noise: Floats) -> list[int]:
    """The gaps that go, in order, the price of each found anew every time."""
    gone = []
    while True:
        lack = np.maximum(0.0, -packing.room)
        bytes_, moments = sums(lack), sums((lack > 0).astype(np.float64))
        first, last = packing.first, packing.last
        given = np.minimum(
            bytes_[last] - bytes_[first], packing.sizes * (moments[last] - moments[first])
        )
        able = packing.kept & ~forced & (given > 0)
        if not lack.any() or not able.any():
            return gone
        price = np.where(able, noise * (packing.loss() + 1.0) / np.maximum(given, 1.0), np.inf)
        gone.append(int(price.argmin()))
        packing.let_go(gone[-1])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [-1, *range(20)])
def test_the_same_gaps_go_as_when_every_price_is_found_anew(seed: int, share: float) -> None:
    gaps, random = gaps_of(seed), np.random.default_rng(abs(seed))
    count = len(gaps.gaps)
    capacity = gaps.smallest + int(share * (gaps.everything - gaps.smallest))
    room = capacity - np.array(gaps.needed, dtype=np.float64)
    forced, noise = random.random(count) < 0.1, random.uniform(0.7, 1.4, count)
    plain, packing = Packing(gaps, room), Packing(gaps, room)
    for each in (plain, packing):
        each.change_to(np.ones(count, dtype=np.bool_))
    before, expected = packing.state(), plainly(plain, forced, noise)
    relief, gone = Relief(packing, packing.kept & ~forced, noise), []
    with np.errstate(divide="ignore"):
        while relief.is_needed():
            there = packing.kept.copy()
            if not relief.let_go_of_one():
                break
            gone += np.flatnonzero(there & ~packing.kept).tolist()
    assert gone == expected
    assert (packing.moved, packing.room.tolist()) == (plain.moved, plain.room.tolist())
    packing.go_back(before)
    assert (packing.moved, packing.kept.all()) == (before.moved, True)
