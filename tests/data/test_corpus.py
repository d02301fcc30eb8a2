"""Where bytes to train on come from, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from patrickstar.data import load_corpus
from patrickstar.errors import DataError


def content(path: Path, limit: int = 1 << 20) -> bytes:
    return bytes(load_corpus(path, limit).tokens.tolist())


def test_the_default_is_python_source_found_on_the_machine() -> None:
    corpus = load_corpus(limit=1 << 20)
    text = bytes(corpus.tokens.tolist()).decode("utf-8", errors="replace")
    assert corpus.tokens.dtype == torch.uint8
    assert corpus.tokens.numel() == 1 << 20
    assert corpus.files > 10 and corpus.left_out > 0
    assert text.count("\nimport ") > 20 and text.count("def ") > 100


def test_a_file_is_its_bytes_with_a_zero_after_them(tmp_path: Path) -> None:
    file = tmp_path / "text.bin"
    file.write_bytes(bytes(range(1, 256)))
    assert content(file) == bytes(range(1, 256)) + b"\0"


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"second")
    (tmp_path / "a").write_bytes(b"first")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c").write_bytes(b"third")
    (tmp_path / ".hidden").write_bytes(b"never")
    (tmp_path / "empty").touch()
    assert content(tmp_path) == b"first\0second\0third\0"


def test_no_more_than_the_limit_is_kept_and_the_rest_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10)
    (tmp_path / "b").write_bytes(b"y" * 10)
    corpus = load_corpus(tmp_path, limit=15)
    assert bytes(corpus.tokens.tolist()) == b"x" * 10 + b"\0" + b"y" * 4
    assert (corpus.files, corpus.left_out) == (2, 6)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*does not exist"):
        load_corpus(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "path, why",
    [
        ("", "does not exist"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null"),
        ("/dev/null/text", "Not a directory"),
    ],
)
def test_a_path_that_cannot_be_one_is_refused(path: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        load_corpus(path)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe' is neither a file nor a folder"):
        load_corpus(tmp_path / "pipe")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no files"):
        load_corpus(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads files without permission")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"text")
    file.chmod(0)
    with pytest.raises(DataError, match=r"secret.*cannot be read"):
        load_corpus(tmp_path)


def test_a_file_that_fails_to_open_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"text")

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"secret.*cannot be read \(Permission denied\)"):
        load_corpus(tmp_path)
