from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import ConfigError
from patrickstar.optim import BlockSums, GradNorm, deepspeed_clip_coef, torch_clip_coef

from .chunked import random_tensors, same_bits

SHAPES = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 70)), min_size=1, max_size=6)


def clipped_by_torch(
    grads: list[torch.Tensor], max_norm: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    return norm, [p.grad for p in params if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 999), max_norm=st.floats(1e-3, 20.0), data=st.data())
def test_norm_and_coefficient_have_torchs_bits_in_any_order_of_arrival(
    dtype: torch.dtype, shapes: Any, seed: int, max_norm: float, data: Any
) -> None:
    grads = [g.to(dtype) for g in random_tensors(shapes, seed, 0.1)]
    want, clipped = clipped_by_torch(grads, max_norm)
    flat = torch.cat([g.reshape(-1) for g in grads])
    views = torch.split(flat, [g.numel() for g in grads])
    norm = GradNorm()
    for index in data.draw(st.permutations(range(len(grads)))):
        norm.add(index, views[index])
    assert same_bits(norm.total(), want)
    coef = torch_clip_coef(norm.total(), max_norm)
    for grad, theirs in zip(grads, clipped, strict=True):
        assert same_bits(grad * coef, theirs)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_gradients_of_several_dtypes_combine_as_torch_combines_them(order: tuple[int, ...]) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.float64]
    grads = [g.to(d) for g, d in zip(random_tensors([(99,)] * 5, 1, 0.1), dtypes, strict=True)]
    norm = GradNorm()
    for index in [*order, 4, 3]:
        norm.add(index, grads[index])
    assert same_bits(norm.total(), torch.nn.utils.get_total_norm(grads))


@settings(max_examples=30, deadline=None)
@given(
    numel=st.integers(1, 120_000),
    cuts=st.lists(st.integers(1, 119_999), max_size=6),
    shuffle=st.integers(0, 99),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_sum_of_pieces_has_the_same_bits_for_every_cutting_and_order(
    numel: int, cuts: list[int], shuffle: int, dtype: torch.dtype
) -> None:
    tensor = random_tensors([(numel,)], 7, 0.1)[0].to(dtype)
    whole = BlockSums(numel)
    whole.add(tensor)
    bounds = [0, *sorted(c for c in set(cuts) if c < numel), numel]
    pieces = list(itertools.pairwise(bounds))
    random.Random(shuffle).shuffle(pieces)
    parts = BlockSums(numel)
    for low, high in pieces:
        parts.add(tensor[low:high], low)
    assert parts.done
    assert parts.total() == whole.total()
    assert whole.total() == pytest.approx(float(tensor.double().square().sum()), rel=1e-13)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_sum_of_pieces_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    tensor = random_tensors([(300_001,)], 7, 0.1)[0]
    before = torch.get_num_threads()
    sums = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            sums.append(BlockSums(tensor.numel()))
            sums[-1].add(tensor)
    finally:
        torch.set_num_threads(before)
    assert sums[0].total() == sums[1].total()


@pytest.mark.parametrize("arithmetic", ["torch", "deepspeed"])
def test_a_tensor_cut_over_chunks_gives_one_norm_however_it_is_cut(arithmetic: Any) -> None:
    grads = random_tensors([(50_000,), (33,), (20_011,)], 3, 0.1)
    totals = []
    for cut in (1, 17, 16384, 30_000):
        norm = GradNorm(arithmetic)
        norm.add(2, grads[2])
        norm.add_piece(0, grads[0][cut:], cut, 50_000)
        norm.add(1, grads[1])
        norm.add_piece(0, grads[0][:cut], 0, 50_000)
        totals.append(norm.total())
    assert all(same_bits(total, totals[0]) for total in totals)
    exact = torch.cat(grads).double().norm()
    torch.testing.assert_close(totals[0].double(), exact, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_norms_of_16_bit_gradients_are_those_of_their_fp32_copies(dtype: torch.dtype) -> None:
    grads = [g.to(dtype) for g in random_tensors([(77, 5), (1,), (2000,)], 4, 0.1)]
    norm = GradNorm(dtype=torch.float32)
    for index, grad in enumerate(grads):
        norm.add(index, grad)
    want, _ = clipped_by_torch([g.float() for g in grads], 1.0)
    assert same_bits(norm.total(), want)


def deepspeed_norm(groups: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """`get_grad_norm_direct` and `combine_grad_norm_groups` of DeepSpeed 0.19.8, one rank."""
    norms = []
    for grads in groups:
        per_tensor = torch.stack([torch.linalg.vector_norm(g.double()) for g in grads])
        norms.append(per_tensor.pow(2).sum().to(dtype).pow(0.5))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=30, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 999), max_norm=st.floats(1e-3, 20.0))
def test_norm_and_factor_are_deepspeeds(
    dtype: torch.dtype, shapes: Any, seed: int, max_norm: float
) -> None:
    scale = 1024.0
    grads = random_tensors([*shapes, (13,)], seed, 0.1 * scale)
    groups = [grads[:1], grads[1:]]
    norm = GradNorm("deepspeed", dtype)
    for index, grad in enumerate(grads):
        norm.add(index, grad, group=min(index, 1))
    want = deepspeed_norm(groups, dtype)
    torch.testing.assert_close(
        norm.total(), want, rtol=3e-7 if dtype.itemsize == 4 else 1e-14, atol=0
    )
    clip = torch.clamp(((want / scale) + 1e-6) / max_norm, min=1.0)
    factor = deepspeed_clip_coef(want, max_norm, scale)
    assert same_bits(factor, 1.0 / (clip * scale))
    assert float(deepspeed_clip_coef(want, 0.0, scale)) == 1.0 / scale


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("arithmetic", ["torch", "deepspeed"])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(arithmetic: Any, bad: float) -> None:
    grad = torch.ones(40_000)
    grad[20_000] = bad
    norm = GradNorm(arithmetic)
    norm.add(0, torch.ones(3))
    norm.add_piece(1, grad, 0, 40_000)
    assert not torch.isfinite(norm.total())


def test_nothing_added_is_a_norm_of_zero_and_reset_forgets() -> None:
    for arithmetic in ("torch", "deepspeed"):
        norm = GradNorm(arithmetic)
        assert float(norm.total()) == 0.0
        norm.add(0, torch.ones(4))
        assert float(norm.total()) == 2.0
        norm.reset()
        assert float(norm.total()) == 0.0


def test_a_gradient_added_twice_or_left_incomplete_is_refused() -> None:
    norm = GradNorm()
    norm.add(0, torch.ones(4))
    with pytest.raises(AssertionError, match="already added"):
        norm.add(0, torch.ones(4))
    norm.add_piece(1, torch.ones(4), 0, 5)
    with pytest.raises(AssertionError, match="4 of 5"):
        norm.total()


def test_ranks_can_add_up_squares() -> None:
    grads = random_tensors([(50,), (60,), (70,)], 3, 0.1)
    norm = GradNorm("deepspeed")
    for index, grad in enumerate(grads):
        norm.add(index, grad)
    assert math.sqrt(norm.squares()) == pytest.approx(float(torch.cat(grads).double().norm()))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_max_norm_that_is_not_positive_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="gradient_clipping"):
        torch_clip_coef(torch.tensor(1.0), bad)
