"""A safetensors header is read with suspicion."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.checkpoint.header import (
    LONGEST_HEADER,
    build_header,
    dtype_code,
    parse_header,
    torch_dtype,
)
from patrickstar.checkpoint.tensor_file import TensorFile
from patrickstar.errors import CheckpointError


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def parse(header: Any, data_bytes: int = 8) -> Any:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(data, data_bytes, "some/file")


def test_a_good_header_gives_dtypes_shapes_and_places() -> None:
    found, metadata = parse({"a": entry(), "__metadata__": {"format": "pt"}})
    assert metadata == {"format": "pt"}
    assert found["a"].dtype is torch.float32 and found["a"].shape == (2,)
    assert found["a"].nbytes == 8


def test_every_dtype_is_called_what_safetensors_calls_it(tmp_path: Path) -> None:
    for code in ("F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL U16 U32 U64 F8_E4M3 F8_E5M2 C64").split():
        dtype = torch_dtype(code)
        assert dtype is not None and dtype_code(dtype) == code
        safetensors.torch.save_file({"a": torch.zeros(3, dtype=dtype)}, tmp_path / "f")
        assert TensorFile(tmp_path / "f").tensors["a"].dtype is dtype


def test_a_built_header_is_aligned_and_read_back() -> None:
    header, places = build_header(
        [("a", torch.float32, (3, 2)), ("b", torch.bool, ()), ("c", torch.float64, (0, 4))],
        {"format": "pt"},
    )
    assert len(header) % 64 == 0
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    found, _ = parse_header(header[8:], 25, "x")
    assert list(found.values()) == places


BAD: dict[str, tuple[Any, str]] = {
    "not JSON": (b"{", "not JSON"),
    "not UTF-8": (b"\xff\xff", "not JSON"),
    "no map": ([1], "not a map"),
    "too deep": (b"[" * 100_000, "not JSON"),
    "a huge number": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    "a name twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}',
        "twice",
    ),
    "no entry": ({"a": 3}, "'a'"),
    "a key too many": ({"a": {**entry(), "code": 1}}, "'a'"),
    "an unknown dtype": ({"a": entry(dtype="PICKLE")}, "unknown dtype"),
    "a dtype that is no text": ({"a": entry(dtype=["F32"])}, "unknown dtype"),
    "a negative size": ({"a": entry(shape=(-2,))}, "shape"),
    "a size that is true": ({"a": entry(shape=(True, 2))}, "shape"),
    "a fraction": ({"a": entry(shape=(2.0,))}, "shape"),
    "65 dimensions": ({"a": entry(shape=(1,) * 65)}, "shape"),
    "offsets backwards": ({"a": entry(offsets=(8, 0))}, "data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 4, 8))}, "data_offsets"),
    "beyond the end": ({"a": entry(shape=(4,), offsets=(0, 16))}, "truncated"),
    "too short for its shape": ({"a": entry(shape=(1,))}, "cannot be bytes"),
    "a product that overflows": ({"a": entry(shape=(1 << 61, 1 << 61, 8))}, "cannot be bytes"),
    "a hole": ({"a": entry(shape=(1,), offsets=(4, 8))}, "hole"),
    "an overlap": ({"a": entry(), "b": entry()}, "overlap"),
    "data that nobody owns": ({"a": entry(shape=(1,), offsets=(0, 4))}, "end at byte 4"),
    "metadata of numbers": ({"a": entry(), "__metadata__": {"x": 1}}, "__metadata__"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_wrong_with_a_header_is_named(kind: str) -> None:
    header, message = BAD[kind]
    with pytest.raises(CheckpointError, match="some/file") as error:
        parse(header)
    assert message in str(error.value)


def test_a_header_that_says_it_is_huge_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", LONGEST_HEADER + 1))
        file.truncate(1 << 33)  # sparse
    with pytest.raises(CheckpointError, match="at most"):
        TensorFile(path)


@pytest.mark.parametrize("length", [0, 7, 8, 9, 40])
def test_a_truncated_file_is_named(length: int, tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.arange(4.0)}, tmp_path / "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:length])
    with pytest.raises(CheckpointError, match="truncated") as error:
        TensorFile(tmp_path / "f")
    assert str(tmp_path / "f") in str(error.value)


_sizes = st.integers(-2, 1 << 70) | st.integers(0, 9)
_json = st.recursive(
    st.none() | st.booleans() | _sizes | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "X"]) | _json,
        "shape": st.lists(_sizes, max_size=4) | _json,
        "data_offsets": st.lists(_sizes, min_size=2, max_size=2) | _json,
    }
)


@given(st.dictionaries(st.text(max_size=8), _entries | _json, max_size=4), st.integers(0, 64))
@settings(max_examples=300, deadline=None)
def test_no_header_does_anything_but_parse_or_fail_with_the_one_error(
    header: dict[str, Any], data_bytes: int
) -> None:
    try:
        found, _ = parse(header, data_bytes)
    except CheckpointError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) == data_bytes


@given(st.binary(max_size=200), st.integers(0, 64))
@settings(max_examples=300, deadline=None)
def test_no_bytes_do_anything_but_parse_or_fail_with_the_one_error(
    header: bytes, data_bytes: int
) -> None:
    with contextlib.suppress(CheckpointError):
        parse(header, data_bytes)
