"""The header of a safetensors file.

    8 bytes        length N of the header, little-endian
    N bytes        JSON: {"name": {"dtype": "F32", "shape": [..], "data_offsets": [from, to]}, ...,
                   "__metadata__": {"key": "text", ...}}
    the rest       the tensors, little-endian, in row-major order

A reader is handed files of unknown origin, so nothing in a header is believed: its length is
limited before it is read, tensors must cover the rest of the file without holes or overlaps, and
each must be as long as its shape and dtype say.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from patrickstar.checkpoint.paths import read_at
from patrickstar.errors import CheckpointError

LONGEST_HEADER = 32 << 20
"""Bytes of JSON that are read and written at most; about 300,000 tensors."""
_MOST_DIMENSIONS = 64

_DTYPES: tuple[tuple[str, str], ...] = (
    ("F64", "float64"),
    ("F32", "float32"),
    ("F16", "float16"),
    ("BF16", "bfloat16"),
    ("I64", "int64"),
    ("I32", "int32"),
    ("I16", "int16"),
    ("I8", "int8"),
    ("U8", "uint8"),
    ("BOOL", "bool"),
    ("U16", "uint16"),
    ("U32", "uint32"),
    ("U64", "uint64"),
    ("C64", "complex64"),
    ("F8_E4M3", "float8_e4m3fn"),
    ("F8_E5M2", "float8_e5m2"),
)


def torch_dtype(code: str) -> torch.dtype | None:
    """The dtype that safetensors calls `code`; None if PyTorch has none."""
    name = dict(_DTYPES).get(code)
    return getattr(torch, name, None) if name else None


def dtype_code(dtype: torch.dtype) -> str | None:
    """What safetensors calls `dtype`; None if it cannot be stored."""
    return next((code for code, name in _DTYPES if getattr(torch, name, None) is dtype), None)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `nbytes` bytes from byte `offset` of the file on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def build_header(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[StoredTensor]]:
    """The first bytes of a file with these tensors in this order, and where each will be.

    Raises:
        CheckpointError: a name comes twice or is reserved, a dtype cannot be stored, or there are
            too many tensors for one file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end, places = 0, []
    for name, dtype, shape in tensors:
        code = dtype_code(dtype)
        if code is None:
            raise CheckpointError(f"tensor {name!r} of dtype {dtype} cannot be stored")
        if name in entries:
            raise CheckpointError(f"two tensors are called {name!r}, or the name is reserved")
        nbytes = math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": code,
            "shape": list(shape),
            "data_offsets": [end, end + nbytes],
        }
        places.append((name, dtype, tuple(shape), end))
        end += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 64)  # tensors begin at a multiple of 8, as the format asks
    text += b" " * 56
    if len(text) > LONGEST_HEADER:
        raise CheckpointError(f"{len(entries)} tensors are too many for one safetensors file")
    start = 8 + len(text)
    stored = [StoredTensor(n, d, s, start + offset) for n, d, s, offset in places]
    return struct.pack("<Q", len(text)) + text, stored


def read_header(file: int, path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors in an open safetensors file by name, and its metadata.

    Raises:
        CheckpointError: it is not a complete safetensors file.
    """
    size = os.fstat(file).st_size
    first = read_at(file, path, 8, 0)
    if len(first) < 8:
        raise CheckpointError(
            f"{str(path)!r} has {size} bytes and is no safetensors file; it may be truncated"
        )
    (length,) = struct.unpack("<Q", first)
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{str(path)!r} says that its header has {length} bytes; at most {LONGEST_HEADER} are "
            "read. The file is damaged or hostile"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{str(path)!r} has {size} bytes, less than its header of {length}; it is truncated"
        )
    header = b""
    while len(header) < length:
        more = read_at(file, path, length - len(header), 8 + len(header))
        if not more:
            raise CheckpointError(f"{str(path)!r} ended while its header was read")
        header += more
    return parse_header(header, size - 8 - length, str(path))


def parse_header(
    header: bytes, data_bytes: int, where: str
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Check and understand the JSON of a header, followed in the file by `data_bytes` bytes.

    Raises:
        CheckpointError: with `where` and the first thing that is wrong.
    """

    def wrong(what: str) -> NoReturn:
        raise CheckpointError(f"the header of {where!r} is damaged: {what}")

    entries = _parse_json(header, wrong)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        wrong("__metadata__ is not a map of texts")
    start, found = 8 + len(header), {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            wrong(f"tensor {name[:80]!r} needs dtype, shape and data_offsets and nothing else")
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = torch_dtype(code) if isinstance(code, str) else None
        if dtype is None:
            wrong(f"tensor {name[:80]!r} has the unknown dtype {str(code)[:20]!r}")
        if not is_shape(shape):
            wrong(f"tensor {name[:80]!r} has no proper shape")
        if not is_shape(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1]:
            wrong(f"tensor {name[:80]!r} has no proper data_offsets")
        nbytes = _limited_product([*shape, dtype.itemsize], data_bytes)
        if nbytes is None or nbytes != offsets[1] - offsets[0] or offsets[1] > data_bytes:
            wrong(
                f"tensor {name[:80]!r} with dtype {code} and shape {shape} cannot be bytes "
                f"{offsets[0]} to {offsets[1]} of {data_bytes}; the file may be truncated"
            )
        ranges.append((offsets[0], offsets[1], name))
        found[name] = StoredTensor(name, dtype, tuple(shape), start + offsets[0])
    end = 0
    for first, last, name in sorted(ranges):
        if first != end:
            wrong(f"there is a hole or an overlap before tensor {name[:80]!r}")
        end = last
    if end != data_bytes:
        wrong(f"tensors end at byte {end}, the file at {data_bytes}")
    return found, metadata


def _parse_json(header: bytes, wrong: Any) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            wrong("a name comes twice")
        return made

    try:
        entries = json.loads(header.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        wrong(f"it is not JSON ({type(error).__name__})")
    if not isinstance(entries, dict):
        wrong("it is not a map")
    made: dict[str, Any] = entries
    return made


def is_shape(value: object) -> bool:
    """Whether `value`, out of JSON, can be the shape of a tensor."""
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMENSIONS
        and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )


def _limited_product(factors: Sequence[int], limit: int) -> int | None:
    """The product; None as soon as it exceeds `limit` without a factor of 0."""
    if 0 in factors:
        return 0
    product = 1
    for factor in factors:
        product *= factor
        if product > limit:
            return None
    return product
