"""A checkpoint is verified before anything of it is used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patrickstar.checkpoint import (
    Checkpoint,
    TensorSource,
    open_checkpoint,
    open_weights,
    publish_weights,
    write_checkpoint,
)
from patrickstar.checkpoint.manifest import Manifest, parse_manifest, write_manifest
from patrickstar.checkpoint.record import FileRecord
from patrickstar.errors import CheckpointError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small checkpoint of all kinds of files."""
    weights = [TensorSource.of(f"layer.{i}", torch.randn(20, 3)) for i in range(3)]
    optimizer = [TensorSource.of(f"exp_avg/layer.{i}", torch.randn(20, 3)) for i in range(3)]
    return write_checkpoint(
        tmp_path_factory.mktemp("whole"),
        "it",
        weights,
        optimizer,
        {"counters": {"global_steps": 3}, "lr": 0.1},
        extra_files={"config.json": b"{}\n"},
        shard_bytes=500,
    )


FILES = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer-00001-of-00002.safetensors",
    "optimizer-00002-of-00002.safetensors",
    "optimizer.safetensors.index.json",
    "state.json",
]


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_the_files_are_these(whole: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == FILES


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_truncated_or_longer_is_named(name: str, copied: Path) -> None:
    data = (copied / name).read_bytes()
    for wrong in (data[:-1], data[: len(data) // 2], b"", data + b"x"):
        (copied / name).write_bytes(wrong)
        if name == "state.json" and wrong in (data[:-1],):  # the last line break has no meaning
            continue
        with pytest.raises(CheckpointError) as error:
            Checkpoint(copied)
        assert str(copied / name) in str(error.value)
    (copied / name).unlink()
    with pytest.raises(CheckpointError) as error:
        Checkpoint(copied)
    assert str(copied / name) in str(error.value)


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_flipped_bit_anywhere_is_found_and_named(whole: Path, data: Any) -> None:
    name = data.draw(st.sampled_from(FILES))
    path = whole / name
    before = path.read_bytes()
    place = data.draw(st.integers(0, len(before) * 8 - 1))
    after = bytearray(before)
    after[place // 8] ^= 1 << (place % 8)
    try:
        path.write_bytes(after)
        try:
            found = Checkpoint(whole)
        except CheckpointError as damage:
            message = str(damage)
        else:
            message = f"{name} loads"
            assert name == "state.json", "only white space of the JSON may differ"
            assert found.state == json.loads(before)["state"]
            found.__exit__(None, None, None)
        assert name in message
    finally:
        path.write_bytes(before)


def test_files_of_two_checkpoints_cannot_be_mixed(copied: Path, tmp_path: Path) -> None:
    other = [TensorSource.of(f"layer.{i}", torch.randn(20, 3)) for i in range(3)]
    path = write_checkpoint(tmp_path / "other", "it", other, [], {}, shard_bytes=500)
    shutil.copy(path / FILES[1], copied / FILES[1])
    with pytest.raises(CheckpointError, match="do not match their checksum"):
        Checkpoint(copied)


@pytest.mark.parametrize("kind", ["symbolic link", "pipe", "folder"])
def test_only_regular_files_are_read(kind: str, copied: Path, tmp_path: Path) -> None:
    path = copied / "model-00001-of-00002.safetensors"
    path.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"symbolic link|not a regular file"):
        Checkpoint(copied)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", ".hidden", "a\0"])
def test_a_manifest_cannot_name_a_file_elsewhere(name: str, tmp_path: Path) -> None:
    write_manifest(tmp_path, Manifest(1, {name: FileRecord(3, "0" * 64)}, {}))
    with pytest.raises(CheckpointError, match="no plain file name"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b", 3, None])
def test_an_index_cannot_name_a_file_elsewhere(name: Any, tmp_path: Path) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no plain file name|not a name"):
        open_weights(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', "{}", "[" * 100_000])
def test_a_damaged_index_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="is no index"):
        open_weights(tmp_path)


def test_an_index_that_names_tensors_no_file_has_is_refused(copied: Path) -> None:
    path = copied / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layer.9"] = FILES[1]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"no file has: layer\.9"):
        open_weights(copied)


def test_a_tensor_in_two_files_is_refused(copied: Path) -> None:
    shutil.copy(copied / FILES[1], copied / FILES[2])
    with pytest.raises(CheckpointError, match=r"'layer\.0' is in"):
        Checkpoint(copied)


def test_a_version_of_the_future_says_so(copied: Path) -> None:
    text = (copied / "state.json").read_text().replace('"version": 1', '"version": 2')
    (copied / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="format version 2"):
        Checkpoint(copied)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_no_manifest_does_anything_but_parse_or_fail_with_the_one_error(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(data, "state.json")


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(st.sampled_from(["sequence", "files", "state", "sha256", "version"]), _values)
)
@settings(max_examples=200, deadline=None)
def test_no_values_in_a_manifest_do_anything_but_fail_with_the_one_error(values: Any) -> None:
    body = {"format": "patrickstar-checkpoint", "version": 1, **values}
    with pytest.raises(CheckpointError):
        parse_manifest(json.dumps(body).encode(), "state.json")


def test_a_checkpoint_without_tensors_is_fine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "empty", [], [], {"a": 1})
    with open_checkpoint(tmp_path) as found:
        assert found.weights.names() == [] and found.state == {"a": 1}


def test_published_weights_replace_those_that_were_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("mine")
    for count, shard_bytes in ((3, 300), (2, 1 << 20), (3, 300)):
        given = {f"w{i}": torch.randn(20, 3) for i in range(count)}
        sources = [TensorSource.of(name, tensor) for name, tensor in given.items()]
        publish_weights(tmp_path, "model", sources, shard_bytes=shard_bytes)
        assert (tmp_path / "model.safetensors").exists() == (shard_bytes > 300)
        with open_weights(tmp_path) as found:
            assert sorted(found.names()) == sorted(given)
            assert all(torch.equal(found.read(name), given[name]) for name in given)
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))
