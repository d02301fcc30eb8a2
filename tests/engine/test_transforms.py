"""`torch.func` and `torch.vmap` over the module of an engine: the results of a plain one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import patrickstar


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "vmap": lambda call: torch.vmap(call)(torch.ones(4, 8)),
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(torch.ones(8)),
    "gradients of each sample": lambda call: torch.vmap(
        torch.func.grad(lambda x: call(x).sum())
    )(torch.ones(4, 8)),
    "jacrev": lambda call: torch.func.jacrev(call)(torch.ones(8)),
    "hessian": lambda call: torch.func.hessian(lambda x: call(x).sum())(torch.ones(8)),
    "jvp": lambda call: torch.func.jvp(call, (torch.ones(8),), (torch.ones(8),))[1],
}  # fmt: skip


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_a_transform_of_the_module_gives_what_it_gives_of_a_plain_one(name: str) -> None:
    engine, _ = patrickstar.initialize_engine(build, {"patrickstar": {"chunk_size": 64}})
    transform = TRANSFORMS[name]
    assert torch.equal(transform(engine.module), transform(build()))
    engine.close()


def test_a_view_of_a_parameter_can_be_taken_inside_a_transform() -> None:
    engine, _ = patrickstar.initialize_engine(build, {})

    def gradient(module: nn.Module) -> torch.Tensor:
        weight = module[0].weight  # type: ignore[index]
        return torch.func.grad(lambda x: (weight.t() @ x).square().sum())(torch.ones(8))

    assert torch.equal(gradient(engine.module), gradient(build()))
    engine.close()
