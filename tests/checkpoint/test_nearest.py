"""Looking for a checkpoint in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.checkpoint import manifest
from patrickstar.checkpoint.nearest import misused, nearest, nothing_there


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """`runs/checkpoint` has a checkpoint and says that it is the latest."""
    made = tmp_path / "runs/checkpoint/step3"
    made.mkdir(parents=True)
    (made / manifest.NAME).write_text("{}")
    (made.parent / "latest").write_text("step3\n")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "asked", ["chekpoint", "checkpoints", ".", "checkpoint/step4", "checkpoint/step4/deeper"]
)
def test_the_nearest_folder_with_a_checkpoint_is_named(asked: str, runs: Path) -> None:
    assert nearest(runs / asked) == runs / "checkpoint"
    told = nothing_there(runs / asked)
    assert "NOTHING IS LOADED" in told and f"Did you mean {str(runs / 'checkpoint')!r}" in told


def test_nothing_is_asked_where_nothing_is_alike(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked in (runs / "of last year", tmp_path / "empty", tmp_path / "nowhere/at/all"):
        assert "Did you mean" not in nothing_there(asked)
        assert misused(asked) is None


def test_a_checkpoint_itself_is_no_folder_of_checkpoints(runs: Path) -> None:
    why = misused(runs / "checkpoint/step3")
    assert why is not None and f"load_checkpoint({str(runs / 'checkpoint')!r}, 'step3')" in why


def test_checkpoints_without_a_latest_one_are_named_by_their_tags(runs: Path) -> None:
    (runs / "checkpoint/latest").unlink()
    why = misused(runs / "checkpoint")
    assert why is not None and "no file 'latest'" in why and "step3" in why


def test_a_file_is_no_folder(runs: Path) -> None:
    why = misused(runs / "checkpoint/latest")
    assert why is not None and "is a file" in why
