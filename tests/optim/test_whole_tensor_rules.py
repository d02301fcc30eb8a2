"""Lamb and Muon: rules that need whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.optim import AdamW, Lamb, Muon, UpdateRule, is_muon_parameter
from patrickstar.optim.newton_schulz import orthogonalize, orthogonalize_gram

from .chunked import Chunked, random_tensors, same_bits
from .deepspeed_oracle import deepspeed_module

SHAPES = [(12, 20), (31, 7), (9, 9)]


def lamb_by_hand(
    weight: torch.Tensor, grads: list[torch.Tensor], hyper: dict[str, Any]
) -> torch.Tensor:
    """DeepSpeed's `lamb_cuda_kernel` parts 1 and 3 in float64."""
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    b1, b2 = hyper["betas"]
    for step, grad in enumerate(grads, 1):
        g = grad.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        inside = hyper["eps_inside_sqrt"]
        denominator = (v + hyper["eps"]).sqrt() if inside else v.sqrt() + hyper["eps"]
        change = m / denominator + hyper["weight_decay"] * w
        size = hyper["lr"]
        if hyper["bias_correction"]:
            size *= math.sqrt(1 - b2**step) / (1 - b1**step)
        ratio = 1.0
        if w.norm() > 0 and change.norm() > 0:
            ratio = float(w.norm() / change.norm())
            ratio = min(max(ratio, hyper["min_coeff"]), hyper["max_coeff"])
        w = w - size * ratio * change
    return w


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"weight_decay": 0.1},
        {"eps_inside_sqrt": True, "bias_correction": False},
        {"max_coeff": 0.05},
        {"min_coeff": 5.0},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lamb_follows_deepspeeds_kernel(extra: dict[str, Any], dtype: torch.dtype) -> None:
    hyper = Lamb().defaults | {"lr": 0.01} | extra
    start = [*random_tensors(SHAPES, 1, 1.0), torch.zeros(5)]
    grads = [random_tensors([*SHAPES, (5,)], 10 + i, 0.1) for i in range(3)]
    grads = [[g.to(dtype).float() for g in step] for step in grads]
    mixed = dtype != torch.float32
    chunked = Chunked(Lamb(), hyper, start, dtype, mixed, align=16)
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step)
    for index, ours in enumerate(chunked.get("master" if mixed else "param")):
        want = lamb_by_hand(start[index], [step[index] for step in grads], hyper)
        torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-6)
    if mixed:
        for param, master in zip(chunked.get("param"), chunked.get("master"), strict=True):
            assert same_bits(param, master.to(dtype))


@pytest.mark.parametrize("rule", [Lamb(), Muon()])
def test_neighbours_in_a_chunk_make_no_difference(rule: UpdateRule) -> None:
    hyper = rule.defaults | {"lr": 0.01}
    start, grads = random_tensors(SHAPES, 1, 1.0), random_tensors(SHAPES, 2, 0.1)
    together = Chunked(rule, hyper, start, torch.bfloat16, True, align=16)
    together.step(grads, 1, grad_scale=0.5)
    for index, ours in enumerate(together.get("master")):
        alone = Chunked(rule, hyper, start[index : index + 1], torch.bfloat16, True)
        alone.step(grads[index : index + 1], 1, grad_scale=0.5)
        assert same_bits(ours, alone.get("master")[0])
    for grad, kept in zip(grads, together.get("grad"), strict=True):
        assert same_bits(kept, grad.bfloat16())


@pytest.mark.parametrize("rule", [Lamb(), Muon()])
def test_a_tensor_cut_over_chunks_is_refused_with_the_chunk_size_needed(rule: UpdateRule) -> None:
    chunked = Chunked(rule, rule.defaults, random_tensors([(12, 20)], 1, 1.0), cuts=[100])
    with pytest.raises(ConfigError, match="at least 240 elements"):
        chunked.step(random_tensors([(12, 20)], 2, 0.1), 1)


@pytest.mark.parametrize("shape", [(24, 60), (60, 24), (30, 30), (3, 16, 40)])
@pytest.mark.parametrize("how", [orthogonalize, orthogonalize_gram])
def test_newton_schulz_brings_singular_values_near_one(how: Any, shape: tuple[int, ...]) -> None:
    matrix = random_tensors([shape], 1, 3.0)[0]
    result = how(matrix, 5, torch.float32)
    values = torch.linalg.svdvals(result)
    # A square random matrix has singular values near 0, which five steps do not lift all the way.
    least = 0.5 if shape[-1] != shape[-2] else 0.0
    assert least < float(values.min()) and float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    alignment = (result * (left @ right)).sum() / math.prod(shape[:-2]) / min(shape[-2:])
    assert float(alignment) > 0.7


def test_both_iterations_agree_in_fp32() -> None:
    for shape in ((24, 60), (60, 24)):
        matrix = random_tensors([shape], 1, 3.0)[0]
        standard = orthogonalize(matrix, 5, torch.float32)
        gram = orthogonalize_gram(matrix, 5, torch.float32)
        torch.testing.assert_close(gram, standard, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(12, 20), (31, 7), (9, 9), (3, 8, 12)])
def test_muon_follows_deepspeeds_update(
    method: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = deepspeed_module("runtime.zero.muon.original_muon", monkeypatch)
    dtypes = {"gram": torch.float32, "standard": torch.bfloat16}
    monkeypatch.setattr(module, "ns_compute_dtype", lambda ns_method="gram": dtypes[ns_method])
    hyper = Muon().defaults | {"lr": 0.1, "weight_decay": 0.2, "ns_method": method}
    start = random_tensors([shape], 1, 1.0)
    grads = [random_tensors([shape], 10 + i, 0.1) for i in range(3)]
    chunked = Chunked(Muon(), hyper, start)
    weight, momentum = start[0].clone(), torch.zeros(shape)
    # DeepSpeed compiles its update; what is compared is the formula.
    with torch.compiler.set_stance("force_eager"):
        for step, grad in enumerate(grads, 1):
            chunked.step(grad, step)
            change = module.muon_update(
                grad[0].clone(), momentum, beta=hyper["momentum"], ns_method=method
            )
            weight.mul_(1 - 0.1 * 0.2).add_(change.reshape(weight.shape), alpha=-0.1)
    torch.testing.assert_close(chunked.get("param")[0], weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(chunked.get("momentum_buffer")[0], momentum, rtol=0, atol=0)


def test_muon_takes_filters_as_rows_of_one_matrix() -> None:
    start, grad = random_tensors([(8, 3, 2, 2)], 1, 1.0), random_tensors([(8, 3, 2, 2)], 2, 0.1)
    filters = Chunked(Muon(), Muon().defaults, start)
    matrix = Chunked(Muon(), Muon().defaults, [start[0].view(8, 12)])
    filters.step(grad, 1)
    matrix.step([grad[0].view(8, 12)], 1)
    assert same_bits(filters.get("param")[0].view(8, 12), matrix.get("param")[0])


def test_muon_by_hand_with_an_orthogonal_gradient() -> None:
    """All singular values are equal, so five steps take each to the same number near 1."""
    hyper = Muon().defaults | {"lr": 0.1, "weight_decay": 0.5}
    grad = torch.linalg.qr(random_tensors([(16, 16)], 1, 1.0)[0]).Q
    start = torch.ones(16, 16)
    chunked = Chunked(Muon(), hyper, [start])
    chunked.step([grad], 1)
    x = 1 / 4.0
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    want = start * (1 - 0.1 * 0.5) - 0.1 * x * grad
    torch.testing.assert_close(chunked.get("param")[0], want, rtol=1e-4, atol=1e-4)


def test_groups_without_muon_are_updated_by_adamw() -> None:
    hyper = Muon().group_defaults(use_muon=False)
    assert (hyper["lr"], hyper["betas"], hyper["eps"], hyper["weight_decay"]) == (
        3e-4,
        (0.9, 0.95),
        1e-10,
        0.0,
    )
    start, grad = random_tensors([(33,)], 1, 1.0), random_tensors([(33,)], 2, 0.1)
    ours, theirs = Chunked(Muon(), hyper, start), Chunked(AdamW(), hyper, start)
    ours.step(grad, 1)
    theirs.step(grad, 1)
    assert same_bits(ours.get("param")[0], theirs.get("param")[0])
    assert [s.name for s in Muon().states(hyper)] == ["exp_avg", "exp_avg_sq"]
    assert [s.name for s in Muon().states(Muon().defaults)] == ["momentum_buffer"]


def test_matrices_that_are_no_embedding_and_no_head_belong_to_muon() -> None:
    assert is_muon_parameter("blocks.0.mlp.weight", (4, 8))
    assert not is_muon_parameter("blocks.0.mlp.bias", (8,))
    assert not is_muon_parameter("transformer.Embed.weight", (4, 8))
    assert not is_muon_parameter("lm_head.weight", (4, 8))


def test_a_vector_given_to_muon_is_refused_with_its_shape() -> None:
    chunked = Chunked(Muon(), Muon().defaults, [torch.ones(5)])
    with pytest.raises(ConfigError, match=r"\(5,\).*use_muon=False"):
        chunked.step([torch.ones(5)], 1)


@pytest.mark.parametrize(
    "rule, bad",
    [
        (Lamb(), {"min_coeff": 20.0}),
        (Lamb(), {"lr": -1.0}),
        (Muon(), {"momentum": 1.0}),
        (Muon(), {"ns_method": "cubic"}),
        (Muon(), {"use_muon": False, "betas": (0.9, 1.0)}),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(rule: UpdateRule, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(bad)[-1]):
        rule.check(rule.defaults | bad)
