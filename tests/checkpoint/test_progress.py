"""What the optimizer knows of a parameter, whatever pieces it is kept in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.checkpoint.progress import Progress, progress_of
from patrickstar.errors import CheckpointError

SAVED = [Progress(4, 3, started=True), Progress(4, 3, changed=True), Progress(4, 5, gradient=True)]


@given(st.builds(Progress, st.integers(0, 99), st.integers(0, 99), *[st.booleans()] * 3))
def test_it_comes_back_from_json(progress: Progress) -> None:
    assert Progress.from_json(progress.to_json()) == progress


def test_other_pieces_join_what_agrees() -> None:
    assert progress_of("w", SAVED, 2, 8) == Progress(6, 3, started=True, changed=True)
    assert progress_of("w", SAVED, 9, 12) == Progress(3, 5, gradient=True)


def test_pieces_that_were_updated_at_different_steps_cannot_be_joined() -> None:
    with pytest.raises(CheckpointError, match=r"rows 6 to 10 of 'w'.*piece_size"):
        progress_of("w", SAVED, 6, 10)


def test_rows_that_nothing_is_known_of_are_named() -> None:
    with pytest.raises(CheckpointError, match="rows 8 to 13 of 'w'"):
        progress_of("w", SAVED, 8, 13)


def test_a_parameter_without_rows_has_its_step() -> None:
    assert progress_of("w", [Progress(0, 7)], 0, 0).step == 7


@pytest.mark.parametrize(
    "entry", [None, 3, [], {}, {"rows": -1}, {"rows": True}, {"rows": 1, "step": 1 << 80}]
)
def test_what_is_no_progress_is_refused(entry: Any) -> None:
    with pytest.raises(CheckpointError):
        Progress.from_json(entry)
