"""Plain values come back from JSON as they were, and nothing else gets in or out."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.checkpoint.plain import decode, encode
from patrickstar.errors import CheckpointError


def there_and_back(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)), "x")


_keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_plain)
@settings(deadline=None)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = there_and_back(value)
    assert back == value and repr(back) == repr(value)


def test_counters_tensors_and_nan_come_back() -> None:
    assert there_and_back(Counter({3: 2})) == Counter({3: 2})
    assert type(there_and_back(Counter())) is Counter
    assert math.isnan(there_and_back(float("nan")))
    for tensor in (torch.tensor(0.1), torch.arange(6).reshape(2, 3), torch.empty(0, 3)):
        back = there_and_back({"t": tensor})["t"]
        assert back.dtype is tensor.dtype and torch.equal(back, tensor)
    assert there_and_back(numpy.float64(0.1)) == 0.1


@pytest.mark.parametrize("value", [object(), numpy.int64(3), {1, 2}, len, torch.float32])
def test_anything_else_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"client\['a'\]\[1\] is a"):
        encode({"a": [0, value]}, "client")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(loop, "client")


def test_a_large_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="at most"):
        encode(torch.zeros(1 << 20), "client")


@pytest.mark.parametrize(
    "value",
    [
        {"$call": ["os.system", "true"]},
        {"$tuple": 3},
        {"$tuple": [], "x": 1},
        {"$map": [[[1], 2]]},
        {"$map": [[1, 2, 3]]},
        {"$counter": {"a": 1}},
        {"$float": "1e999"},
        {"$bytes": "?"},
        {"$bytes": 7},
        {"$tensor": ["F32", [2], "AAAA"]},
        {"$tensor": ["PICKLE", [1], "AAAA"]},
        {"$tensor": ["F32", [0, 1 << 70], ""]},
        {"$tensor": ["F32", [-1], ""]},
        {"$tensor": "F32"},
    ],
)
def test_damaged_values_are_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match="the thing"):
        decode({"a": [value]}, "the thing")


def test_what_is_nested_too_deep_is_refused() -> None:
    value: Any = 1
    for _ in range(500):
        value = {"$tuple": [value]}
    with pytest.raises(CheckpointError, match="too deep"):
        decode(value, "the thing")


_tags = st.sampled_from(["$tuple", "$map", "$counter", "$float", "$bytes", "$tensor", "$x", "a"])
_hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["F32", "="]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_tags, inner, max_size=2),
    max_leaves=10,
)


@given(_hostile)
@settings(max_examples=300, deadline=None)
def test_no_json_does_anything_but_decode_or_fail_with_the_one_error(value: Any) -> None:
    with contextlib.suppress(CheckpointError):
        decode(value, "the thing")
