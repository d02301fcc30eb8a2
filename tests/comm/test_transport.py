"""Reductions as arithmetic: factors and dtypes."""

from __future__ import annotations

import pytest
import torch

from patrickstar.comm import CommValueError
from patrickstar.comm.transport import Reduction, overlaps, sum_dtype, to_wire


def test_an_average_divides_by_the_ranks_in_total_however_it_is_split():
    for before in (None, 1.0, 2.0, 8.0):
        reduction = Reduction.of("avg", 8, torch.float32, before, None)
        assert reduction.predivide * reduction.postdivide == 8.0


def test_the_two_halves_of_a_reduction_are_the_whole():
    whole = Reduction.of("avg", 6, torch.float16, 2.0, None)
    first, second = whole.before_only(), whole.after_only()
    assert first.predivide * second.predivide == whole.predivide
    assert first.postdivide * second.postdivide == whole.postdivide


@pytest.mark.parametrize(
    ("op", "wire", "before", "after"),
    [
        ("max", torch.float32, None, None),
        ("avg", torch.float32, None, 2.0),
        ("sum", torch.float32, -1.0, None),
        ("avg", torch.float32, 0.0, None),
        ("avg", torch.int64, None, None),
    ],
)
def test_reductions_that_make_no_sense_are_refused(op, wire, before, after):
    with pytest.raises(CommValueError):
        Reduction.of(op, 4, wire, before, after)


def test_sums_of_16_bit_floats_are_kept_in_float32():
    assert sum_dtype(torch.bfloat16) is sum_dtype(torch.float16) is torch.float32
    assert sum_dtype(torch.float64) is torch.float64
    assert sum_dtype(torch.int64) is torch.int64


def test_dividing_before_rounding_saves_a_value_that_would_overflow():
    out = torch.empty(1, dtype=torch.float16)
    to_wire(torch.tensor([120000.0]), out, 2.0)
    assert out.item() == 60000.0


def test_widening_and_then_dividing_keeps_the_narrow_values_exact():
    narrow = torch.tensor([1.0078125], dtype=torch.bfloat16)
    out = torch.empty(1)
    to_wire(narrow, out, 3.0)
    assert out.item() == (torch.tensor([1.0078125]) / 3.0).item()


def test_views_of_one_storage_overlap():
    storage = torch.zeros(8)
    assert overlaps(storage[:4], storage[4:])
    assert not overlaps(storage, torch.zeros(8))
