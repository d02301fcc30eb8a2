"""Copies in fp32 that share one buffer."""

from __future__ import annotations

import pytest
import torch

from patrickstar.optim import Widened
from patrickstar.optim.widened import _LARGEST


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_norms_of_the_copies_have_the_bits_of_norms_of_fresh_copies(dtype: torch.dtype) -> None:
    widened = Widened()
    for shape in [(3, 5), (257, 129), (1000,), (2, 2), ()]:
        tensor = torch.randn(shape).to(dtype)
        expected = torch.linalg.vector_norm(tensor.float())
        assert torch.linalg.vector_norm(widened.of(tensor)).equal(expected)


def test_a_tensor_whose_strides_are_its_own_keeps_them() -> None:
    tensor = torch.randn(2, 3, 4, 5).bfloat16().to(memory_format=torch.channels_last)
    copy = Widened().of(tensor)
    assert copy.stride() == tensor.stride()
    assert copy.equal(tensor.float())


def test_fp32_is_not_copied() -> None:
    tensor = torch.randn(7)
    assert Widened().of(tensor) is tensor


def test_one_buffer_serves_tensors_one_after_another_until_it_is_released() -> None:
    widened = Widened()
    first = widened.of(torch.ones(64, 64, dtype=torch.bfloat16))
    again = widened.of(torch.ones(100, dtype=torch.bfloat16))
    assert again.data_ptr() == first.data_ptr()
    widened.release()
    assert widened._buffer is None


def test_what_is_larger_than_the_buffer_may_be_is_not_held() -> None:
    widened = Widened()
    large = widened.of(torch.ones(_LARGEST + 1, dtype=torch.bfloat16))
    assert large.dtype is torch.float32 and large.numel() == _LARGEST + 1
    assert widened._buffer is None
