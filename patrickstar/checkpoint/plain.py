"""Plain values as JSON that comes back as it was.

JSON has no tuples, no keys but texts, no infinities, and no bytes. Schedulers, hyperparameters,
random states and a user's own state have all of them, so these are written as tagged maps:

    (1, 2)           {"$tuple": [1, 2]}
    {3: "x"}         {"$map": [[3, "x"]]}      also for keys that begin with "$"
    Counter          {"$counter": [[key, n]]}
    float("inf")     {"$float": "inf"}
    b"..."           {"$bytes": "base64"}
    a tensor         {"$tensor": ["F32", [shape], "base64"]}   at most 1 MiB

Nothing else is accepted, and nothing is ever executed to read it.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from typing import Any

import torch

from patrickstar.checkpoint.header import dtype_code, torch_dtype
from patrickstar.checkpoint.tensor_file import bytes_of
from patrickstar.errors import CheckpointError

_LARGEST_TENSOR = 1 << 20
_DEEPEST = 100


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """`value` as something that JSON can hold.

    Raises:
        CheckpointError: it has a part of another type; the message says where.
    """
    if depth > _DEEPEST:
        raise CheckpointError(f"{where} is nested more than {_DEEPEST} deep, or contains itself")
    if value is None or isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where)
    if isinstance(value, list):
        return [encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        plain = not isinstance(value, Counter) and all(
            isinstance(key, str) and not key.startswith("$") for key in value
        )
        items = [
            [encode(k, f"a key of {where}", depth + 1), encode(v, f"{where}[{k!r}]", depth + 1)]
            for k, v in value.items()
        ]
        if plain:
            return dict(items)
        return {"$counter" if isinstance(value, Counter) else "$map": items}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which a checkpoint does "
        "not hold; use numbers, texts, bytes, small tensors, lists, tuples and dicts"
    )


def decode(value: Any, where: str) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointError: a tag is unknown or its contents are wrong.
    """
    if isinstance(value, list):
        return [decode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(v, f"{where}[{key!r}]") for key, v in value.items()}
    try:
        (tag,) = value
        return _TAGS[tag](value[tag], where)
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, binascii.Error) as error:
        raise CheckpointError(f"{where} in the checkpoint is damaged: {tags[:3]}") from error


def _encode_tensor(tensor: torch.Tensor, where: str) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    code = dtype_code(tensor.dtype)
    if code is None or tensor.nbytes > _LARGEST_TENSOR:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.nbytes} bytes and dtype {tensor.dtype}; tensors there "
            f"have at most {_LARGEST_TENSOR} bytes"
        )
    data = base64.b64encode(bytes(bytes_of(tensor))).decode()
    return {"$tensor": [code, list(tensor.shape), data]}


def _decode_tensor(value: Any, where: str) -> torch.Tensor:
    code, shape, text = value
    dtype, data = torch_dtype(code), base64.b64decode(text, validate=True)
    if dtype is None or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(where)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(where)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _decode_map(value: Any, where: str) -> dict[Any, Any]:
    return {decode(k, f"a key of {where}"): decode(v, f"{where}[{k!r}]") for k, v in value}


def _decode_float(value: Any, where: str) -> float:
    if value not in ("inf", "-inf", "nan"):
        raise ValueError(where)
    return float(value)


_TAGS = {
    "$tuple": lambda value, where: tuple(decode(list(value), where)),
    "$map": _decode_map,
    "$counter": lambda value, where: Counter(_decode_map(value, where)),
    "$float": _decode_float,
    "$bytes": lambda value, where: base64.b64decode(value, validate=True),
    "$tensor": _decode_tensor,
}
