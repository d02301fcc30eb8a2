"""SGD, Adagrad, Lion and wrapped classes against per-tensor loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.errors import ConfigError
from patrickstar.optim import SGD, Adagrad, Lion, Scratch, TorchRule, UpdateRule

from .chunked import Chunked, plain_loop, random_tensors, same_bits

SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 9), st.integers(1, 70))),
    min_size=1,
    max_size=6,
)
CUTS = st.lists(st.integers(1, 2000), max_size=4)


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper has it, written without regard to memory."""

    def __init__(self, params: Any, lr: float, betas: Any, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = (m * beta1 + p.grad * (1 - beta1)).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])
                m.copy_(m * beta2 + p.grad * (1 - beta2))


def case(
    rule: UpdateRule, optimizer: Any, hyper: dict[str, Any], ident: str, **only_torch: Any
) -> Any:
    return pytest.param(rule, optimizer, hyper, only_torch, id=ident)


CASES = [
    case(SGD(), torch.optim.SGD, {"lr": 0.1}, "sgd", fused=True),
    case(
        SGD(),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        "sgd-nesterov",
        fused=True,
    ),
    case(
        SGD(),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "maximize": True},
        "sgd-dampening",
        fused=True,
    ),
    case(
        Adagrad(),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        "adagrad",
        fused=True,
    ),
    case(
        Adagrad(fused=False),
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "maximize": True},
        "adagrad-unfused",
    ),
    *(
        case(TorchRule(cls), cls, {"lr": 0.05, "weight_decay": 0.1}, cls.__name__)
        for cls in (
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.Adamax,
            torch.optim.Adadelta,
            torch.optim.ASGD,
        )
    ),
    case(TorchRule(torch.optim.Rprop), torch.optim.Rprop, {"lr": 0.05}, "Rprop"),
    case(TorchRule(torch.optim.SGD), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, "SGD-wrapped"),
    case(
        TorchRule(torch.optim.RMSprop),
        torch.optim.RMSprop,
        {"lr": 0.05, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
        "RMSprop",
    ),
]


@pytest.mark.parametrize("rule, optimizer, hyper, only_torch", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=12, deadline=None)
@given(shapes=SHAPES, cuts=CUTS, seed=st.integers(0, 999), block=st.sampled_from([64, 0]))
def test_flat_runs_have_the_bits_of_a_per_tensor_loop(
    rule: UpdateRule,
    optimizer: Any,
    hyper: dict[str, Any],
    only_torch: dict[str, Any],
    dtype: torch.dtype,
    shapes: Any,
    cuts: Any,
    seed: int,
    block: int,
) -> None:
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000 + i, 0.1) for i in range(3)]
    rule.check(rule.defaults | hyper)
    chunked = Chunked(rule, rule.defaults | hyper, start, dtype, dtype != torch.float32, cuts=cuts)
    for step, grad in enumerate(grads, 1):
        chunked.step(grad, step, scratch=Scratch(block))
    params, masters, _ = plain_loop(optimizer, start, grads, dtype, **hyper, **only_torch)
    want = {"param": params} if dtype == torch.float32 else {"param": params, "master": masters}
    for name, tensors in want.items():
        for ours, theirs in zip(chunked.get(name), tensors, strict=True):
            assert same_bits(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(shapes=SHAPES, cuts=CUTS, seed=st.integers(0, 999))
def test_lion_follows_its_paper_and_does_not_depend_on_cuts(
    shapes: Any, cuts: Any, seed: int
) -> None:
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    start = random_tensors(shapes, seed, 1.0)
    grads = [random_tensors(shapes, seed + 1000 + i, 0.1) for i in range(3)]
    one, other = Chunked(Lion(), hyper, start, cuts=cuts), Chunked(Lion(), hyper, start)
    for step, grad in enumerate(grads, 1):
        one.step(grad, step, scratch=Scratch(64))
        other.step(grad, step)
    _, masters, _ = plain_loop(PlainLion, start, grads, torch.float32, **hyper)
    for ours, same, theirs in zip(one.get("param"), other.get("param"), masters, strict=True):
        assert same_bits(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lion_leaves_a_weight_alone_that_never_had_a_gradient() -> None:
    hyper = Lion().defaults | {"lr": 0.5}
    for rule, want in ((Lion(), 1.0), (Lion(deepspeed_exact=True), 0.5)):
        chunked = Chunked(rule, hyper, [torch.ones(3)])
        chunked.step([torch.zeros(3)], 1)
        assert chunked.get("param")[0].tolist() == [want] * 3


@pytest.mark.parametrize(
    "cls",
    [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam],
)
def test_a_class_that_is_not_elementwise_is_refused_by_name(cls: Any) -> None:
    with pytest.raises(ConfigError, match=cls.__name__):
        TorchRule(cls)


def test_a_wrapped_class_says_itself_what_is_out_of_range() -> None:
    rule = TorchRule(torch.optim.RMSprop)
    with pytest.raises(ConfigError, match=r"RMSprop.*learning rate"):
        rule.check(rule.defaults | {"lr": -1.0})


def test_states_follow_the_hyperparameters() -> None:
    sgd = TorchRule(torch.optim.SGD)
    assert [s.name for s in sgd.states(sgd.defaults)] == []
    assert [s.name for s in sgd.states(sgd.defaults | {"momentum": 0.9})] == ["momentum_buffer"]
    nadam = TorchRule(torch.optim.NAdam)
    names = [s.name for s in nadam.states(nadam.defaults)]
    assert names == ["exp_avg", "exp_avg_sq", "mu_product"]
    assert SGD().states(SGD().defaults) == ()
    assert Adagrad().states({"initial_accumulator_value": 0.5})[0].init == 0.5


@pytest.mark.parametrize(
    "rule, bad",
    [
        (SGD(), {"lr": -1.0}),
        (SGD(), {"nesterov": True}),
        (Adagrad(), {"eps": -1.0}),
        (Lion(), {"betas": (0.9, 1.0)}),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(rule: UpdateRule, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        rule.check(rule.defaults | bad)


def test_every_rule_is_an_update_rule() -> None:
    for rule in (SGD(), Adagrad(), Lion(), TorchRule(torch.optim.AdamW)):
        assert isinstance(rule, UpdateRule)
        assert rule.defaults is not rule.defaults
