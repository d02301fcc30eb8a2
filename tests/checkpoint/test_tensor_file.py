"""Tensors go to a file and come back one by one."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from patrickstar.checkpoint import TensorFile, TensorSource, write_tensor_file
from patrickstar.checkpoint.shards import split, write_shards
from patrickstar.errors import CheckpointError

MIB = 1 << 20


def peak_growth_starts_here() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory(key: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM, the most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) * 1024


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    given = {
        "matrix": torch.randn(5, 7),
        "transposed": torch.randn(5, 7).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3).bfloat16(),
        "mask": torch.tensor([True, False]),
    }
    sources = [TensorSource.of(name, tensor) for name, tensor in given.items()]
    record = write_tensor_file(tmp_path / "f", sources, {"format": "pt"})
    data = (tmp_path / "f").read_bytes()
    assert record.nbytes == len(data) and record.sha256 == hashlib.sha256(data).hexdigest()
    loaded = safetensors.torch.load_file(tmp_path / "f")
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded[name].dtype is tensor.dtype and torch.equal(loaded[name], tensor), name
    file = TensorFile(tmp_path / "f")
    for name, tensor in given.items():
        assert torch.equal(file.read(file.tensors[name]), tensor), name


def test_what_safetensors_wrote_is_read(tmp_path: Path) -> None:
    given = {"a": torch.randn(4, 6).half(), "b": torch.arange(10)}
    safetensors.torch.save_file(given, tmp_path / "f", {"who": "them"})
    file = TensorFile(tmp_path / "f")
    assert file.metadata == {"who": "them"}
    for name, tensor in given.items():
        assert torch.equal(file.read(file.tensors[name]), tensor)


def test_any_range_is_read_into_any_dtype_and_stride(tmp_path: Path) -> None:
    given = torch.randn(40, 6)
    write_tensor_file(tmp_path / "f", [TensorSource.of("a", given)], {})
    file = TensorFile(tmp_path / "f")
    stored = file.tensors["a"]
    rows = torch.empty(7, 6)
    file.read_into(stored, rows, 5 * 6)
    assert torch.equal(rows, given[5:12])
    low = torch.empty(7, 6, dtype=torch.bfloat16)
    file.read_into(stored, low, 5 * 6)
    assert torch.equal(low, given[5:12].bfloat16())
    strided = torch.empty(6, 7).t()
    file.read_into(stored, strided, 5 * 6)
    assert torch.equal(strided, given[5:12])


def test_a_tensor_may_come_in_parts(tmp_path: Path) -> None:
    whole = torch.randn(10, 3)
    source = TensorSource("a", whole.dtype, (10, 3), lambda: iter((whole[:4], whole[4:])))
    write_tensor_file(tmp_path / "f", [source], {})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "f")["a"], whole)


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensor_file(tmp_path / "f", [], {})


@pytest.mark.parametrize("dtype", [torch.complex128, torch.qint8])
def test_a_dtype_without_a_name_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    source = TensorSource("a", dtype, (), lambda: iter(()))
    with pytest.raises(CheckpointError, match="'a'"):
        write_tensor_file(tmp_path / "f", [source], {})


def test_two_tensors_cannot_have_one_name(tmp_path: Path) -> None:
    sources = [TensorSource.of("a", torch.zeros(1))] * 2
    with pytest.raises(CheckpointError, match="two tensors"):
        write_tensor_file(tmp_path / "f", sources, {})


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux's to tell"
)
def test_files_are_streamed(tmp_path: Path) -> None:
    """192 MiB go through in parts of 4 MiB with a few parts' memory, whatever malloc keeps."""

    def parts() -> Iterator[torch.Tensor]:
        for value in range(24):
            yield torch.full((MIB,), float(value))

    sources = [TensorSource(f"t{i}", torch.float32, (24 * MIB,), parts) for i in range(2)]
    gc.collect()
    peak_growth_starts_here()
    before = memory("VmRSS")
    record = write_tensor_file(tmp_path / "f", sources, {})
    assert record.nbytes > 192 * MIB
    assert memory("VmHWM") - before < 40 * MIB
    file = TensorFile(tmp_path / "f")
    target = torch.zeros(MIB)
    peak_growth_starts_here()
    before = memory("VmRSS")
    file.verify(record)
    for value in range(24):
        file.read_into(file.tensors["t1"], target, value * MIB)
        assert target.eq(value).all()
    assert memory("VmHWM") - before < 40 * MIB


def test_shards_hold_whole_tensors_in_order(tmp_path: Path) -> None:
    sizes = [10, 90, 20, 300, 5, 5]
    sources = [TensorSource.of(f"t{i}", torch.zeros(n)) for i, n in enumerate(sizes)]
    shards = split(sources, 400)
    assert [[s.name for s in shard] for shard in shards] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4", "t5"],
    ]
    records = write_shards(tmp_path, "model", sources, 400)
    assert set(records) == {path.name for path in tmp_path.iterdir()}
