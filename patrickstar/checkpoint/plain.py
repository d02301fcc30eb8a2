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
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from patrickstar.checkpoint.header import dtype_code, is_shape, torch_dtype
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


def decode(value: Any, where: str, depth: int = 0) -> Any:
    """What `encode` was given.

    Raises:
        CheckpointError: a tag is unknown, its contents are wrong, or values are nested too deep.
    """
    if depth > 3 * _DEEPEST:
        raise CheckpointError(f"{where[:80]} in the checkpoint is nested too deep")
    if isinstance(value, list):
        return [decode(v, where, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(v, where, depth + 1) for key, v in value.items()}
    try:
        (tag,) = value
        return _TAGS[tag](value[tag], where, depth + 1)
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"{where[:80]} in the checkpoint has a damaged value {tags[0][:20]!r}"
        ) from error


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


def _decode_tensor(value: Any, where: str, depth: int) -> torch.Tensor:
    code, shape, text = _list(value)
    dtype, data = torch_dtype(code), base64.b64decode(text, validate=True)
    if dtype is None or not is_shape(shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(where)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)


def _decode_tuple(value: Any, where: str, depth: int) -> tuple[Any, ...]:
    return tuple(decode(_list(value), where, depth))


def _decode_map(value: Any, where: str, depth: int) -> dict[Any, Any]:
    return {decode(k, where, depth): decode(v, where, depth) for k, v in map(_list, _list(value))}


def _decode_counter(value: Any, where: str, depth: int) -> Counter[Any]:
    return Counter(_decode_map(value, where, depth))


def _decode_float(value: Any, where: str, depth: int) -> float:
    if value not in ("inf", "-inf", "nan"):
        raise ValueError(where)
    return float(value)


def _decode_bytes(value: Any, where: str, depth: int) -> bytes:
    return base64.b64decode(value, validate=True)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(type(value))
    return value


_TAGS: dict[str, Callable[[Any, str, int], Any]] = {
    "$tuple": _decode_tuple,
    "$map": _decode_map,
    "$counter": _decode_counter,
    "$float": _decode_float,
    "$bytes": _decode_bytes,
    "$tensor": _decode_tensor,
}
