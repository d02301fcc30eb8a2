"""The batch triple."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patrickstar.config import load_config
from patrickstar.errors import ConfigError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
COUNTS = st.integers(1, 64)


def resolved(world_size: int = 1, **keys: int) -> tuple[int, int, int]:
    config = load_config(keys, world_size=world_size)
    return (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    )


@given(micro=COUNTS, steps=COUNTS, world_size=st.integers(1, 16))
def test_any_two_of_the_three_give_the_third(micro: int, steps: int, world_size: int) -> None:
    whole = (micro * steps * world_size, micro, steps)
    for left_out in range(3):
        two = {
            name: value
            for i, (name, value) in enumerate(zip(NAMES, whole, strict=True))
            if i != left_out
        }
        assert resolved(world_size, **two) == whole
    assert resolved(world_size, **dict(zip(NAMES, whole, strict=True))) == whole


def test_a_train_batch_alone_is_one_micro_batch_a_rank() -> None:
    assert resolved(4, train_batch_size=32) == (32, 8, 1)


def test_a_micro_batch_alone_is_not_accumulated() -> None:
    assert resolved(4, train_micro_batch_size_per_gpu=8) == (32, 8, 1)


def test_accumulation_steps_alone_go_with_a_micro_batch_of_one() -> None:
    assert resolved(2, gradient_accumulation_steps=5) == (10, 1, 5)


def test_no_batch_key_at_all_is_a_micro_batch_of_one() -> None:
    assert resolved(3) == (3, 1, 1)


def test_auto_and_null_count_as_left_out() -> None:
    for left_out in ("auto", None):
        config = load_config({"train_batch_size": left_out, "train_micro_batch_size_per_gpu": 4})
        assert config.train_batch_size == 4


def test_a_contradiction_names_the_three_and_the_world_size() -> None:
    keys = dict(zip(NAMES, (9, 2, 2), strict=True))
    with pytest.raises(ConfigError, match=r"9.*2.*2.*2.*8") as raised:
        load_config(keys, world_size=2)
    assert all(name in str(raised.value) for name in NAMES)


def test_a_remainder_is_refused_instead_of_dropped() -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        load_config({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [1]])
def test_a_batch_key_is_a_positive_integer(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config({name: value})
