"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.errors import ConfigError
from patrickstar.memory import format_budget, format_bytes, parse_bytes
from patrickstar.memory.sizes import size_at_least


@pytest.mark.parametrize(
    "text,nbytes",
    [
        (4096, 4096),
        (4096.0, 4096),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5GiB", 3 << 29),
        (" 2 TiB ", 2 << 40),
        ("500MB", 500_000_000),
        ("0", 0),
    ],
)
def test_a_size_is_read(text: str | int | float, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "1,5GiB", "-1", "1e9", "1 G iB", -1, float("nan"), True, "1.5", 1.5]
)
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert str(text) in str(caught.value)


def test_a_part_of_a_byte_is_asked_for_its_unit() -> None:
    with pytest.raises(ConfigError, match=r"'1\.5' without a unit .* '1\.5GiB'"):
        parse_bytes("1.5")


def test_an_unknown_unit_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown unit 'gibi'; use B, KiB"):
        parse_bytes("1gibi")


@given(st.integers(0, 1 << 60))
def test_every_number_of_bytes_is_itself(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == nbytes


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read_to_two_decimals(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= max(1, nbytes * 0.005)


@given(st.integers(0, 1 << 50))
def test_a_size_that_is_named_as_enough_is_never_rounded_down(nbytes: int) -> None:
    assert nbytes <= parse_bytes(size_at_least(nbytes)) <= nbytes * 1.01 + 1


def test_a_budget_that_lost_its_unit_is_asked_about() -> None:
    assert format_budget(8) == "8 B (did you mean 8GiB?)"
    assert format_budget(4096) == "4.00 KiB (did you mean 4096MiB?)"
    assert format_budget(64 << 10) == "64.00 KiB"


def test_sizes_are_written_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "5.00 TiB",
    ]
