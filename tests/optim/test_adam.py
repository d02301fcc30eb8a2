from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import ConfigError
from patrickstar.optim import Adam, AdamW, GradNorm, Run, Scratch, torch_clip_coef

from .chunked import Chunked, plain_loop, random_tensors, same_bits

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 9), st.integers(1, 70)),
        st.tuples(st.integers(1, 900)),
    ),
    min_size=1,
    max_size=7,
)
CUTS = st.lists(st.integers(1, 2000), max_size=4)
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


PAIRS = [
    pytest.param(AdamW(), torch.optim.AdamW, id="AdamW"),
    pytest.param(Adam(), torch.optim.Adam, id="Adam"),
]


@pytest.mark.parametrize("rule, optimizer", PAIRS)
@settings(max_examples=40, deadline=None)
@given(shapes=SHAPES, cuts=CUTS, align=st.sampled_from([1, 16]), seed=st.integers(0, 999))
def test_fp32_runs_have_the_bits_of_fused_per_tensor_updates(
    rule: AdamW, optimizer: Any, shapes: Any, cuts: Any, align: int, seed: int
) -> None:
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000 + i, 0.01) for i in range(3)]
    chunked = Chunked(rule, rule.defaults | HYPER, start, align=align, cuts=cuts)
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step)
    _, masters, opt = plain_loop(optimizer, start, grads, torch.float32, fused=True, **HYPER)
    for ours, theirs in zip(chunked.get("param"), masters, strict=True):
        assert same_bits(ours, theirs)
    for name in ("exp_avg", "exp_avg_sq"):
        for ours, state in zip(chunked.get(name), opt.state.values(), strict=True):
            assert same_bits(ours, state[name])


@pytest.mark.parametrize("rule, optimizer", PAIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    cuts=CUTS,
    align=st.sampled_from([1, 16]),
    seed=st.integers(0, 999),
    block=st.sampled_from([64, 256, 0]),
)
def test_mixed_runs_have_the_bits_of_fp32_masters_and_a_cast(
    rule: AdamW,
    optimizer: Any,
    dtype: torch.dtype,
    shapes: Any,
    cuts: Any,
    align: int,
    seed: int,
    block: int,
) -> None:
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000 + i, 0.01) for i in range(3)]
    chunked = Chunked(rule, rule.defaults | HYPER, start, dtype, True, align, cuts)
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step, scratch=Scratch(block))
    params, masters, _ = plain_loop(optimizer, start, grads, dtype, fused=True, **HYPER)
    for name, want in (("param", params), ("master", masters)):
        for ours, theirs in zip(chunked.get(name), want, strict=True):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("clip_16_bit", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=25, deadline=None)
@given(
    shapes=SHAPES,
    cuts=CUTS,
    seed=st.integers(0, 999),
    max_norm=st.floats(1e-3, 10.0),
    block=st.sampled_from([64, 0]),
)
def test_clipping_then_stepping_has_the_bits_of_clip_grad_norm_(
    dtype: torch.dtype,
    clip_16_bit: bool,
    shapes: Any,
    cuts: Any,
    seed: int,
    max_norm: float,
    block: int,
) -> None:
    rule = AdamW()
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000 + i, 0.05) for i in range(2)]
    mixed = dtype != torch.float32
    chunked = Chunked(rule, rule.defaults | HYPER, start, dtype, mixed, cuts=cuts)
    for step, grad in enumerate(grads, 1):
        norm = GradNorm(dtype=None if clip_16_bit else torch.float32)
        for index, tensor in enumerate(grad):
            norm.add(index, tensor.to(dtype))
        coef = torch_clip_coef(norm.total(), max_norm)
        chunked.step(
            grad, step, grad_scale=coef, scale_in_grad_dtype=clip_16_bit, scratch=Scratch(block)
        )
    params, _, _ = plain_loop(
        torch.optim.AdamW,
        start,
        grads,
        dtype,
        max_norm=max_norm,
        clip_16_bit=clip_16_bit,
        fused=True,
        **HYPER,
    )
    for ours, theirs in zip(chunked.get("param"), params, strict=True):
        assert same_bits(ours, theirs)


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 999), max_norm=st.floats(1e-3, 1.0))
def test_unscaling_then_clipping_rounds_twice_as_a_plain_loop_does(
    shapes: Any, seed: int, max_norm: float
) -> None:
    rule = AdamW()
    unscale = 1.0 / 3.0
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000, 0.05)]
    chunked = Chunked(rule, rule.defaults | HYPER, start, torch.bfloat16, True)
    norm = GradNorm()
    for index, tensor in enumerate(grads[0]):
        norm.add(index, tensor.bfloat16().float() * unscale)
    coef = torch_clip_coef(norm.total(), max_norm)
    chunked.step(grads[0], 1, grad_scale=(unscale, coef))
    _, masters, _ = plain_loop(
        torch.optim.AdamW,
        start,
        grads,
        torch.bfloat16,
        unscale=unscale,
        max_norm=max_norm,
        fused=True,
        **HYPER,
    )
    for ours, theirs in zip(chunked.get("master"), masters, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("extra", [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("rule, optimizer", PAIRS)
def test_other_hyperparameters_mean_what_they_mean_in_torch(
    rule: AdamW, optimizer: Any, extra: dict[str, Any]
) -> None:
    shapes = [(37, 5), (16,), (3,)]
    start = random_tensors(shapes, 1, 1.0)
    grads = [random_tensors(shapes, 2 + i, 0.1 / (i + 1)) for i in range(4)]
    chunked = Chunked(rule, rule.defaults | HYPER | extra, start)
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step)
    _, masters, opt = plain_loop(
        optimizer, start, grads, torch.float32, fused=True, **(HYPER | extra)
    )
    for ours, theirs in zip(chunked.get("param"), masters, strict=True):
        assert same_bits(ours, theirs)
    if "amsgrad" in extra:
        for ours, state in zip(chunked.get("max_exp_avg_sq"), opt.state.values(), strict=True):
            assert same_bits(ours, state["max_exp_avg_sq"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_without_a_master_are_updated_in_their_own_dtype(dtype: torch.dtype) -> None:
    rule = AdamW()
    shapes = [(33, 31), (17,), (250,)]
    start = [t.to(dtype) for t in random_tensors(shapes, 1, 1.0)]
    grads = [[t.to(dtype) for t in random_tensors(shapes, 2 + i, 0.1)] for i in range(3)]
    chunked = Chunked(rule, rule.defaults | HYPER, start, dtype, cuts=[100, 900])
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step)
    masters = [torch.nn.Parameter(t.clone()) for t in start]
    opt = torch.optim.AdamW(masters, fused=True, **HYPER)
    for grad in grads:
        for master, value in zip(masters, grad, strict=True):
            master.grad = value.clone()
        opt.step()
    for ours, theirs in zip(chunked.get("param"), masters, strict=True):
        assert same_bits(ours, theirs.detach())


def test_without_bias_correction_the_moments_are_used_as_they_are() -> None:
    rule = AdamW()
    hyper = rule.defaults | HYPER | {"bias_correction": False}
    start, grad = random_tensors([(50,)], 1, 1.0), random_tensors([(50,)], 2, 0.1)
    chunked = Chunked(rule, hyper, start)
    chunked.step(grad, 1)
    exp_avg, exp_avg_sq = 0.1 * grad[0], 0.05 * grad[0] ** 2
    want = start[0] * (1 - 1e-2 * 0.1) - 1e-2 * exp_avg / (exp_avg_sq.sqrt() + 1e-8)
    torch.testing.assert_close(chunked.get("param")[0], want)


def test_a_large_run_is_walked_in_several_blocks_with_the_same_bits() -> None:
    rule = AdamW()
    shapes = [(700_003,)]
    start, grads = random_tensors(shapes, 1, 1.0), [random_tensors(shapes, 2, 0.01)]
    chunked = Chunked(rule, rule.defaults | HYPER, start, torch.bfloat16, True)
    scratch = Scratch()
    chunked.step(grads[0], 1, scratch=scratch)
    params, _, _ = plain_loop(torch.optim.AdamW, start, grads, torch.bfloat16, fused=True, **HYPER)
    assert same_bits(chunked.get("param")[0], params[0])
    assert 0 < scratch.nbytes <= 6 * scratch.block_for(torch.device("cpu"))
    scratch.release()
    assert scratch.nbytes == 0


def test_gradients_are_left_as_they_were() -> None:
    rule = AdamW()
    start, grads = random_tensors([(1000,)], 1, 1.0), random_tensors([(1000,)], 2, 0.01)
    for dtype, in_dtype in ((torch.float32, False), (torch.bfloat16, True)):
        chunked = Chunked(rule, rule.defaults | HYPER, start, dtype, dtype == torch.bfloat16)
        chunked.step(grads, 1, grad_scale=0.3, scale_in_grad_dtype=in_dtype)
        assert same_bits(chunked.get("grad")[0], grads[0].to(dtype))


def test_padding_between_tensors_stays_zero() -> None:
    rule = AdamW()
    shapes = [(5,), (19,), (3, 3)]
    chunked = Chunked(rule, rule.defaults | HYPER, random_tensors(shapes, 1, 1.0), align=16)
    for step in (1, 2):
        chunked.step(random_tensors(shapes, step, 0.1), step)
    used = torch.zeros(chunked.layout.numel, dtype=torch.bool)
    for seg in chunked.layout.segments:
        used[seg.start : seg.stop] = True
    assert not chunked.flat["param"][~used].any()
    assert not chunked.flat["exp_avg"][~used].any()


@pytest.mark.parametrize(
    "bad", [{"lr": -1.0}, {"eps": -1e-8}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}]
)
def test_a_hyperparameter_out_of_range_is_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        AdamW().check(AdamW().defaults | bad)


def test_a_run_that_does_not_fit_together_is_refused() -> None:
    state = {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    run = Run(torch.zeros(4), torch.zeros(3), None, state, 1)
    with pytest.raises(AssertionError):
        AdamW().apply([run], AdamW().defaults)
