"""A few of the accidents that `make soak` tries by the hundred."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from soak import accidents, damage, disks
from soak.run import PARTS
from soak.tally import Tally, attempt


@pytest.mark.parametrize(
    "accident",
    [
        accidents.error_in_user_code,
        accidents.clocks,
        accidents.forked_workers,
        accidents.two_engines,
        accidents.nothing_installed,
    ],
    ids=lambda accident: str(accident.__name__),
)
def test_a_run_has_its_bits_in_spite_of_an_accident(
    accident: accidents.Accident, tmp_path: Path
) -> None:
    assert accident(tmp_path, random.Random(3)) is None


@pytest.mark.parametrize("seed", range(6))
def test_bad_numbers_do_what_they_do_in_an_ordinary_loop(seed: int, tmp_path: Path) -> None:
    assert accidents.bad_numbers(tmp_path, random.Random(seed)) is None


@pytest.mark.parametrize("number", range(3))  # making the spool, reading from it, renaming
def test_a_run_survives_files_that_fail(number: int, tmp_path: Path) -> None:
    found = disks.sick_run(number, 1, tmp_path)
    assert found["why"] is None, found


def test_damaged_checkpoints_and_spool_slots_are_found(tmp_path: Path) -> None:
    assert not any(damage.checkpoints(12, 1, tmp_path))
    assert damage.slots(0, 1, tmp_path) is None


def test_a_tally_counts_what_a_try_raises_as_lost() -> None:
    tally = Tally("tries")
    attempt(tally, "good", lambda: None)
    attempt(tally, "bad", lambda: "it was not so")
    attempt(tally, "worse", lambda: str(1 / 0))
    assert (tally.tried, len(tally.lost)) == (3, 2)
    assert "bad: it was not so" in tally.lost and "ZeroDivisionError" in tally.lost[1]


def test_every_part_is_there() -> None:
    for part in PARTS:
        assert (Path(accidents.__file__).parent / f"{part}.py").exists()
