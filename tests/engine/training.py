"""Runs of a few steps, with the engine and without it, that tests compare bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.precision import Precision
from patrickstar.memory import FurthestNextUse, Policy
from patrickstar.optim import AdamW, UpdateRule

HYPER = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}

Provider = Callable[[], nn.Module]
Batches = Sequence[dict[str, Any]]


@dataclass
class Outcome:
    """What a run produced, in the order of the model's parameters."""

    losses: list[float] = field(default_factory=list)
    gradients: list[list[torch.Tensor | None]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def assert_same(self, other: Outcome) -> None:
        assert self.losses == other.losses
        for step, (ours, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if a is None or b is None:
                    assert a is None and b is None, f"step {step}, parameter {index}"
                else:
                    assert torch.equal(a, b), f"step {step}, gradient of parameter {index}"
        assert self.weights.keys() == other.weights.keys()
        for name, weight in self.weights.items():
            assert torch.equal(weight, other.weights[name]), name


def settings(
    *,
    precision: str = "fp32",
    host: int | None = None,
    device: int | None = None,
    disk: Path | None = None,
    chunk: int | None = None,
    clipping: float = 0.0,
    accumulation: int = 1,
    policy: Policy | None = None,
    plan: bool = True,
    rule: UpdateRule | None = None,
    hyper: dict[str, Any] | None = None,
    accelerator: bool = False,
    update_on: Literal["host", "device"] = "host",
) -> RunSettings:
    chosen = Precision(precision)
    rule = rule or AdamW()
    return RunSettings(
        chosen,
        rule,
        {**rule.defaults, **(HYPER if hyper is None else hyper)},
        clipping,
        accumulation,
        device,
        host,
        None if disk is None else (disk, None),
        chunk,
        policy or FurthestNextUse(),
        plan,
        True,
        chosen.dtype,
        False,
        # The tiers of an accelerator, with the CPU standing for it.
        device=torch.device("cpu") if accelerator else None,
        update_on=update_on,
    )


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output["loss"]


def run_engine(
    provider: Provider,
    batches: Batches,
    how: RunSettings,
    *,
    param_groups: Any = None,
    keep_gradients: bool = True,
    look: Callable[[Engine, ChunkedOptimizer], None] | None = None,
) -> Outcome:
    """Train on `batches` with the engine; the module is built from seed 0."""
    torch.manual_seed(0)
    engine, optimizer = make_engine(provider, how, param_groups)
    outcome = Outcome()
    try:
        for batch in batches:
            loss = loss_of(engine(**batch))
            engine.backward(loss)
            if keep_gradients:
                grads = [p.grad for p in engine.parameters()]
                outcome.gradients.append([None if g is None else g.clone() for g in grads])
                del grads
            optimizer.step()
            optimizer.zero_grad()
            outcome.losses.append(loss.item())
            if look is not None:
                look(engine, optimizer)
        outcome.weights = {k: v.clone() for k, v in engine.state_dict().items()}
    finally:
        engine.close()
    return outcome


def run_plain(
    provider: Provider,
    batches: Batches,
    *,
    precision: str = "fp32",
    clipping: float = 0.0,
    accumulation: int = 1,
    hyper: dict[str, Any] | None = None,
    optimizer_class: Any = torch.optim.AdamW,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    **options: Any,
) -> Outcome:
    """The same with an ordinary loop: fp32 masters beside 16-bit parameters."""
    torch.manual_seed(0)
    module = provider()
    low = precision != "fp32"
    given = groups(module) if groups else [{"params": list(module.parameters())}]
    trained = [p for group in given for p in group["params"] if p.requires_grad]
    masters = {id(p): p.detach().clone() if low else p for p in trained}
    if low:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        for p in module.parameters():
            p.data = p.data.to(dtype)
        for part in module.modules():  # rotary tables stay in fp32, as with DeepSpeed
            if isinstance(part, nn.modules.batchnorm._NormBase):
                part.to(dtype)
    made = [
        {**g, "params": [masters[id(p)] for p in g["params"] if p.requires_grad]} for g in given
    ]
    options = options or {"fused": True}
    optimizer = optimizer_class(made, **(HYPER if hyper is None else hyper), **options)
    outcome = Outcome()
    for index, batch in enumerate(batches):
        loss = loss_of(module(**batch))
        (loss / accumulation if accumulation > 1 else loss).backward()
        grads = [p.grad for p in module.parameters()]
        outcome.gradients.append([None if g is None else g.clone() for g in grads])
        outcome.losses.append(loss.item())
        if (index + 1) % accumulation:
            continue
        if low:
            for p in trained:
                masters[id(p)].grad = None if p.grad is None else p.grad.float()
                p.grad = None
        if clipping:
            torch.nn.utils.clip_grad_norm_(list(masters.values()), clipping)
        optimizer.step()
        optimizer.zero_grad()
        if low:
            with torch.no_grad():
                for p in trained:
                    p.copy_(masters[id(p)])
    outcome.weights = {k: v.detach().clone() for k, v in module.state_dict().items()}
    return outcome


def smallest_budget(
    provider: Provider,
    batches: Batches,
    disk: Path,
    **how: Any,
) -> int:
    """The smallest host budget that works, found by taking each refusal's word."""
    from patrickstar.errors import BudgetError

    budget = 1 << 18
    for _ in range(200):
        try:
            run_engine(provider, batches[:2], settings(host=budget, disk=disk, **how))
        except BudgetError as error:
            budget = max(error.smallest, budget + 1)
        else:
            return budget
    raise AssertionError("no budget works")
