"""Files that `torch.save` wrote, read without running what is in them.

Such a file is a zip archive with a pickle of the objects and one stored record for each storage. A
pickle is a program, so it is not trusted with anything:

- every opcode is looked at before any is run; those that could name an object in another way than
  by module and name, or make us allocate by a number alone, are refused,
- a name means something only if it is in the table below. Nothing is ever imported: tensors become
  records of where their bytes are, containers are containers, and DeepSpeed's own classes become
  inert objects that remember what they were called with,
- every other name, such as `os.system`, is an error.

The bytes of tensors are read when they are asked for, in any range, straight to where they belong.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from patrickstar.checkpoint.header import StoredTensor, is_shape
from patrickstar.checkpoint.paths import open_regular, read_at
from patrickstar.checkpoint.tensor_file import bytes_of, read_elements
from patrickstar.errors import CheckpointError

_LONGEST_PICKLE = 64 << 20
_MOST_RECORDS = 1 << 20
_BLOCK = 8 << 20

_OPCODES = frozenset(
    """
    PROTO STOP FRAME MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES EMPTY_LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS EMPTY_SET ADDITEMS
    FROZENSET BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE BUILD
    NEWOBJ BINPERSID
    """.split()
)

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class Foreign:
    """An object of a class that is not ours to make: what it was called with, and its state."""

    name = ""
    args: tuple[Any, ...] = ()
    state: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = dict(state) if isinstance(state, dict) else {"state": state}

    def __reduce__(self) -> Any:
        raise TypeError("what came out of a checkpoint is not pickled again")


@dataclass(frozen=True)
class PickledTensor:
    """A tensor in the file; `storage` is the flat one that it is a view of."""

    file: TorchFile
    storage: StoredTensor
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements `start` to `stop` in row-major order, flat, in fresh memory."""
        stop = self.numel if stop is None else stop
        if self._is_contiguous():
            flat = torch.empty(stop - start, dtype=self.dtype)
            self.file.read_into(self.storage, flat, self.offset + start)
            return flat
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) + 1
        held = torch.empty(reach if self.numel else 0, dtype=self.dtype)
        self.file.read_into(self.storage, held, self.offset)
        return held.as_strided(self.shape, self.stride).reshape(-1)[start:stop]

    def _is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class TorchFile:
    """An open file of `torch.save`.

    Attributes:
        content: what was saved, with a `PickledTensor` for each tensor.

    Raises:
        CheckpointError: it is no such file, is damaged, or names what may not be named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            self._size = os.fstat(self._file).st_size
            self._checksums: dict[str, int] = {}
            self._records = self._read_directory()
            self.content = self._load()
        except BaseException:
            self.close()
            raise

    def read_into(self, stored: StoredTensor, target: torch.Tensor, start: int = 0) -> None:
        """Fill `target` with elements of a storage, from number `start` on."""
        read_elements(self._file, self.path, stored, target, start)

    def verify(self) -> None:
        """Compare every record with the checksum that torch.save wrote along.

        Raises:
            CheckpointError: one is damaged.
        """
        for name, (start, length) in self._records.items():
            crc = 0
            for first in range(0, length, _BLOCK):
                block = torch.empty(min(_BLOCK, length - first), dtype=torch.uint8)
                place = StoredTensor(name, torch.uint8, (length,), start)
                self.read_into(place, block, first)
                crc = zlib.crc32(bytes_of(block), crc)
            if crc != self._checksums[name]:
                raise self._wrong(f"its record {name!r} does not match its checksum")

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{str(self.path)!r} cannot be read: {what}")

    def _read_directory(self) -> dict[str, tuple[int, int]]:
        """First byte and length of every record by its name, without the folder they are in."""
        try:
            with os.fdopen(os.dup(self._file), "rb") as raw, zipfile.ZipFile(raw) as archive:
                infos = archive.infolist()
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            struct.error,
        ) as error:
            raise self._wrong(
                "it is no complete zip archive, which torch.save writes; it may be truncated"
            ) from error
        if len(infos) > _MOST_RECORDS:
            raise self._wrong(f"it has {len(infos)} records, more than {_MOST_RECORDS}")
        records = {}
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise self._wrong(f"record {info.filename[:80]!r} is compressed")
            within = 0 <= info.header_offset < self._size
            header = read_at(self._file, self.path, 30, info.header_offset) if within else b""
            if len(header) < 30 or header[:4] != b"PK\x03\x04":
                raise self._wrong(f"record {info.filename[:80]!r} is not where it should be")
            name_length, extra_length = struct.unpack("<HH", header[26:30])
            start = info.header_offset + 30 + name_length + extra_length
            if start + info.file_size > self._size:
                raise self._wrong(f"record {info.filename[:80]!r} goes beyond the end of the file")
            name = info.filename.partition("/")[2]
            records[name], self._checksums[name] = (start, info.file_size), info.CRC
        return records

    def _read_record(self, name: str, limit: int) -> bytes:
        if name not in self._records:
            raise self._wrong(f"it has no record {name!r}, so torch.save did not write it")
        start, length = self._records[name]
        if length > limit:
            raise self._wrong(f"its record {name!r} has {length} bytes, more than {limit}")
        data = torch.empty(length, dtype=torch.uint8)
        self.read_into(StoredTensor(name, torch.uint8, (length,), start), data)
        return data.numpy().tobytes()

    def _load(self) -> Any:
        if "byteorder" in self._records and self._read_record("byteorder", 16) != b"little":
            raise self._wrong("it was written on a machine with another byte order")
        data = self._read_record("data.pkl", _LONGEST_PICKLE)
        try:
            check_opcodes(data)
            return _Unpickler(data, self).load()
        except CheckpointError as error:
            raise self._wrong(str(error)) from error
        except Exception as error:
            raise self._wrong(f"its pickle is damaged ({type(error).__name__})") from error

    def storage(self, identifier: Any) -> StoredTensor:
        """The storage that a pickle calls `identifier`."""
        kind, dtype, key, _, numel = identifier
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(key, str):
            raise CheckpointError("it refers to something that is no storage")
        start, length = self._records.get(f"data/{key}", (0, -1))
        if not is_shape([numel]) or numel * dtype.itemsize > length:
            raise CheckpointError(f"storage {key[:20]!r} of {dtype} is missing or too short")
        return StoredTensor(key, dtype, (numel,), start)


def check_opcodes(data: bytes) -> None:
    """Look at a whole pickle before any of it is run.

    Raises:
        CheckpointError: it has an opcode that plain data does not need.
        ValueError: it is no pickle.
    """
    stored = 0
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES:
            raise CheckpointError(f"its pickle has the opcode {opcode.name}, which is not allowed")
        if opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            # The unpickler's memory grows to the largest number, whatever the pickle's length.
            if argument is not None and argument > stored:
                raise CheckpointError("its pickle remembers objects out of order")
            stored += 1


class _Unpickler(pickle.Unpickler):
    """Names mean what is in our table, and nothing is imported."""

    def __init__(self, data: bytes, file: TorchFile) -> None:
        super().__init__(io.BytesIO(data))
        self._torch_file = file
        self._foreign: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        dtype = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(dtype, torch.dtype):
            return dtype
        full = f"{module}.{name}"
        if full in _MEANINGS:
            return _MEANINGS[full]
        if module.split(".")[0] == "deepspeed":
            return self._foreign.setdefault(full, type("Foreign", (Foreign,), {"name": name}))
        raise CheckpointError(
            f"it names {full[:120]!r}, which is neither a tensor nor a plain container; "
            "nothing of the file is used"
        )

    def persistent_load(self, identifier: Any) -> Any:
        return _Storage(self._torch_file, self._torch_file.storage(identifier))


@dataclass(frozen=True)
class _Storage:
    file: TorchFile
    stored: StoredTensor


class _Meaning:
    """What a name means. Nothing can be set on it, so a pickle cannot change it for the next."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise TypeError(f"{name} cannot be set")


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *ignored: Any) -> PickledTensor:
    shape, stride = tuple(shape), tuple(stride)
    good = isinstance(storage, _Storage) and len(shape) == len(stride)
    if not good or not is_shape([offset, *stride]) or not is_shape(list(shape)):
        raise CheckpointError("a tensor in its pickle is damaged")
    end = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    if 0 not in shape and end > storage.stored.numel:
        raise CheckpointError("a tensor in its pickle is longer than its storage")
    if math.prod(shape) > storage.stored.numel:
        raise CheckpointError("a tensor in its pickle has more elements than its storage")
    return PickledTensor(storage.file, storage.stored, offset, shape, stride)


def _parameter(data: Any, *ignored: Any) -> Any:
    return data


def _of_type(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    if rebuild is not _MEANINGS["torch._utils._rebuild_tensor_v2"]:
        raise CheckpointError("a tensor in its pickle is of no known kind")
    return rebuild(*args)


def _size(values: Any = ()) -> tuple[int, ...]:
    made = list(values)
    if not is_shape(made):
        raise CheckpointError("a shape in its pickle is damaged")
    return tuple(made)


def _device(*args: Any) -> str:
    return ":".join(str(arg) for arg in args[:2])


def _only_named(*args: Any) -> NoReturn:
    raise CheckpointError("its pickle makes an object of a class that may only be named")


_MEANINGS: dict[str, _Meaning | type] = {
    "collections.OrderedDict": OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "torch.Size": _Meaning(_size),
    "torch.device": _Meaning(_device),
    "torch.Tensor": _Meaning(_only_named),
    "torch.nn.parameter.Parameter": _Meaning(_only_named),
    "torch._utils._rebuild_tensor_v2": _Meaning(_tensor),
    "torch._utils._rebuild_parameter": _Meaning(_parameter),
    "torch._tensor._rebuild_from_type_v2": _Meaning(_of_type),
}
