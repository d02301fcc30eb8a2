"""Folders that are replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.integrations.replacing import recover, replacing


def write(target: Path, text: str) -> None:
    with replacing(target) as folder:
        (folder / text).write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for text in ("first", "second"):
        write(tmp_path / "kept", text)
        assert names(tmp_path) == [f"kept/{text}"]


def test_one_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    write(tmp_path / "kept", "first")
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "kept", "no such/second")
    assert names(tmp_path) == ["kept/first"]


def test_what_a_kill_in_the_exchange_left_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kept"
    write(target, "first")
    move = Path.replace

    def killed(path: Path, to: Path) -> Path:
        if to == target:
            raise KeyboardInterrupt
        return move(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write(target, "second")
    assert not target.exists()
    recover(target)
    assert names(tmp_path) == ["kept/first"]
    recover(target)
    assert names(tmp_path) == ["kept/first"]


def test_a_leftover_is_not_taken_for_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "kept", "first")
    (tmp_path / ".kept.old").mkdir()
    (tmp_path / ".kept.new").mkdir()
    write(tmp_path / "kept", "second")
    assert names(tmp_path) == ["kept/second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
