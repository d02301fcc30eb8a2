"""An ordinary `torch.optim.Optimizer` with the formula of one of our rules, over ordinary tensors.

It is how a script names a rule that `torch.optim` has no class for, and how DeepSpeed's own
optimizer classes exist here. Given to `initialize`, its rule and groups are taken over by the
engine; on its own it updates its tensors itself, whole, with states in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.update import Run, Scratch, UpdateRule


class RuleOptimizer(torch.optim.Optimizer):
    """Updates fp32 tensors by `rule`.

    Args:
        params: parameters or parameter groups.
        rule: the formula.
        hyper: hyperparameters over the rule's defaults.

    Raises:
        ConfigError: a hyperparameter is out of range.
    """

    def __init__(self, params: Iterable[Any], rule: UpdateRule, **hyper: Any) -> None:
        defaults = {**rule.defaults, **hyper}
        rule.check(defaults)
        super().__init__(params, defaults)
        self.rule = rule
        self._scratch = Scratch()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; see `torch.optim.Optimizer.step`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            runs = [self._run(p, group) for p in group["params"] if p.grad is not None]
            if runs:
                self.rule.apply(runs, group, scratch=self._scratch)
        return loss

    def _run(self, parameter: torch.Tensor, group: dict[str, Any]) -> Run:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        for spec in self.rule.states(group):
            if spec.name not in state:
                state[spec.name] = torch.full_like(
                    parameter, spec.init, memory_format=torch.contiguous_format
                )
        assert parameter.grad is not None
        return Run(
            parameter.view(-1),
            parameter.grad.contiguous().view(-1),
            None,
            {spec.name: state[spec.name].view(-1) for spec in self.rule.states(group)},
            state["step"],
            Layout((Segment(0, tuple(parameter.shape), key=id(parameter)),)),
        )
