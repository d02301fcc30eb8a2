"""Values over steps, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.report.series import Series

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(values=VALUES, most=st.integers(2, 20))
def test_buckets_keep_mean_and_extremes_of_any_length(
    values: list[float | None], most: int
) -> None:
    series = Series(most=most)
    for step, value in enumerate(values, 1):
        series.add(step, {"loss": value, "other": 1.0})
    there = [value for value in values if value is not None]
    assert len(series.steps) <= most
    steps, buckets = series.points("loss")
    assert sum(bucket.count for bucket in buckets) == len(there)
    assert steps == sorted(set(steps))
    if there:
        assert series.mean("loss") == pytest.approx(sum(there) / len(there), abs=1e-3)
        assert min(bucket.low for bucket in buckets) == min(there)
        assert max(bucket.high for bucket in buckets) == max(there)
    assert series.mean("other") == 1.0


def test_a_short_run_keeps_every_step() -> None:
    series = Series()
    for step in range(1, 100):
        series.add(step, {"loss": float(step)})
    steps, buckets = series.points("loss")
    assert steps == list(range(1, 100)) == [bucket.mean for bucket in buckets]


def test_a_step_that_does_not_come_after_the_last_is_left_out() -> None:
    series = Series()
    for step in (5, 3, 6):
        series.add(step, {"loss": float(step)})
    assert series.points("loss")[0] == [5, 6]
    assert series.points("nothing") == ([], [])
