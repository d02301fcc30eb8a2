"""The formula of the shortest step."""

from __future__ import annotations

import pytest

from benchmarks.limit import Rates, ideal, in_memory

RATES = Rates(gemm=1e12, copy=10e9, read=2e9, write=1e9)


def test_in_memory_nothing_is_read_from_disk() -> None:
    limit = ideal(1_000_000_000, 512, 1.0, RATES)
    assert limit.disk == 0.0
    assert limit.compute == pytest.approx(6 * 1e9 * 512 / 1e12)
    assert limit.update == pytest.approx(28 * 1e9 / 10e9)
    assert limit.step == limit.compute
    assert limit.bound == "compute"


def test_recomputation_costs_one_more_forward() -> None:
    without, with_ = (ideal(10**9, 512, 1.0, RATES, recompute=r).compute for r in (False, True))
    assert with_ / without == pytest.approx(8 / 6)


def test_state_on_disk_is_read_and_written_once_and_weights_read_twice() -> None:
    limit = ideal(10**9, 1, 0.25, RATES)
    assert limit.disk == pytest.approx(0.75 * (12 * (0.5 + 1.0) + 2 * (1.0 + 1.0)))
    assert limit.bound == "disk"


@pytest.mark.parametrize("used,part", [(0, 0.0), (7 * 10**6, 0.5), (14 * 10**6, 1.0), (10**9, 1.0)])
def test_the_part_in_memory_is_what_fourteen_bytes_a_parameter_make_of_it(
    used: int, part: float
) -> None:
    assert in_memory(10**6, used) == part
