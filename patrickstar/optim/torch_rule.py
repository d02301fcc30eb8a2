"""Any elementwise optimizer class with the interface of `torch.optim.Optimizer`, on flat runs.

An instance of the class is given one block at a time as its only parameter, with the block's slices
of the state, so the arithmetic and its bits are those of the class itself. On the first update the
class makes its state as it always does, and what it made is copied into the run's state tensors.

Some classes keep a number per parameter besides the step (NAdam's ``mu_product``, ASGD's ``eta``
and ``mu``). It is kept in a state tensor of the run like any other, once for each element: four
bytes per weight more, and no bookkeeping per parameter anywhere else.

Whether a class is elementwise is tried, not assumed: three updates of a small matrix must give the
bits of the same updates of its elements one by one. Adafactor, LBFGS, Muon and SparseAdam are not.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patrickstar.errors import ConfigError
from patrickstar.optim.layout import Segment
from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec
from patrickstar.optim.walk import Scaling


@dataclass(frozen=True, slots=True)
class TorchRule:
    """Wraps an optimizer class.

    Args:
        optimizer: a subclass of `torch.optim.Optimizer` whose update is elementwise.

    Raises:
        ConfigError: the class is not elementwise, or cannot be tried with its defaults.
    """

    optimizer: type[torch.optim.Optimizer]

    def __post_init__(self) -> None:
        _assert_elementwise(self.optimizer)

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.optimizer.__name__

    @property
    def per_tensor(self) -> bool:
        """False: elementwise."""
        return False

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the class."""
        return dict(_fresh(self.optimizer, {}).defaults)

    def states(self, hyper: Hyper) -> tuple[StateSpec, ...]:
        """The state tensors that the class makes under these hyperparameters."""
        elementwise, scalars = self._state_names(hyper)
        return tuple(StateSpec(name) for name in (*elementwise, *scalars))

    def check(self, hyper: Hyper) -> None:
        """Raise `ConfigError` with what the class says about these hyperparameters."""
        accepted = inspect.signature(self.optimizer.__init__).parameters
        kwargs = {k: v for k, v in hyper.items() if k in accepted and k != "params"}
        try:
            self.optimizer([torch.zeros(1)], **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"optimizer {self.name}: {error}") from error

    def apply(
        self,
        runs: Sequence[Run],
        hyper: Hyper,
        *,
        grad_scale: GradScale = 1.0,
        scale_in_grad_dtype: bool = False,
        scratch: Scratch | None = None,
    ) -> None:
        """Update the runs in place; see `UpdateRule.apply`."""
        scratch = Scratch() if scratch is None else scratch
        scaling = Scaling.of(grad_scale, scale_in_grad_dtype)
        names = self._state_names(hyper)
        optimizer = _fresh(self.optimizer, hyper)
        with torch.no_grad():
            for run in runs:
                run.check()
                # A number per parameter is read where its tensor begins.
                whole = (Segment(0, (run.weight.numel(),)),)
                for seg in run.segments if names[1] else whole:
                    _update_segment(optimizer, run, seg, names, scaling, scratch)

    def _state_names(self, hyper: Hyper) -> tuple[list[str], list[str]]:
        """Names of the elementwise states and of the numbers per parameter, without the step."""
        optimizer = _fresh(self.optimizer, hyper)
        weight = torch.zeros(2)
        state = _step(optimizer, weight, torch.zeros(2), {})
        elementwise = [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 1]
        scalars = [
            k for k, v in state.items() if isinstance(v, Tensor) and v.dim() == 0 and k != "step"
        ]
        return elementwise, scalars


def _update_segment(
    optimizer: torch.optim.Optimizer,
    run: Run,
    seg: Segment,
    names: tuple[list[str], list[str]],
    scaling: Scaling,
    scratch: Scratch,
) -> None:
    weight = run.weight
    elementwise, scalars = names
    block = scratch.block_for(weight.device)
    numbers = {name: run.state[name][seg.start].clone() for name in scalars}
    made: dict[str, Any] = {}
    for low in range(seg.start, seg.stop, block):
        high = min(low + block, seg.stop)
        part = weight[low:high]
        grad = scaling.load(run.grad[low:high], weight.dtype, scratch)
        state: dict[str, Any] = {}
        if run.step > 1:
            state = {name: run.state[name][low:high] for name in elementwise}
            state |= {name: number.clone() for name, number in numbers.items()}
            state["step"] = torch.tensor(float(run.step - 1))
        made = _step(optimizer, part, grad, state)
        for name in elementwise:
            # After the first update, most classes have changed our slice in place; some replace it.
            mine = run.state[name][low:high]
            if made[name].data_ptr() != mine.data_ptr():
                mine.copy_(made[name])
        if run.master is not None:
            run.param[low:high].copy_(part)
    for name in scalars:
        run.state[name][seg.start : seg.stop] = made[name]


def _fresh(cls: type[torch.optim.Optimizer], hyper: Hyper) -> torch.optim.Optimizer:
    optimizer = cls([torch.zeros(1)])  # type: ignore[call-arg]
    optimizer.param_groups[0].update({k: v for k, v in hyper.items() if k != "params"})
    return optimizer


def _step(
    optimizer: torch.optim.Optimizer, weight: Tensor, grad: Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """One update of a tensor by an optimizer that knows no other; returns the state after it."""
    weight = weight.detach()
    weight.grad = grad
    optimizer.param_groups[0]["params"] = [weight]
    optimizer.state.clear()
    optimizer.state[weight] = state
    try:
        optimizer.step()
        return dict(optimizer.state[weight])
    finally:
        weight.grad = None
        optimizer.state.clear()


def _assert_elementwise(cls: type[torch.optim.Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 2, generator=generator)
    grads = [torch.randn(3, 2, generator=generator) for _ in range(3)]
    try:
        whole = _trajectory(cls, start, grads)
        flat = [grad.reshape(-1) for grad in grads]
        parts = [
            _trajectory(cls, start.reshape(-1)[i : i + 1], [grad[i : i + 1] for grad in flat])
            for i in range(start.numel())
        ]
    except Exception as error:
        raise ConfigError(
            f"optimizer {cls.__name__} cannot update a plain tensor with its defaults: {error}"
        ) from error
    if not torch.equal(torch.cat(parts), whole.reshape(-1)):
        raise ConfigError(
            f"optimizer {cls.__name__} is not elementwise: it updates a weight by what other "
            "weights of the same tensor hold, so it cannot work on chunks; use an elementwise one"
        )


def _trajectory(cls: type[torch.optim.Optimizer], start: Tensor, grads: list[Tensor]) -> Tensor:
    weight = start.clone()
    optimizer = cls([weight])  # type: ignore[call-arg]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()
