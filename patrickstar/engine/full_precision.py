"""One weight in full: its fp32 value, its gradient and the states the optimizer keeps of it.

A parameter knows the home of its chunk, the home knows the run it belongs to, and the run knows
where the master weight and the states of that parameter lie. So these functions take a parameter
and nothing else, which is what DeepSpeed's `safe_get_full_*` and `safe_set_full_*` take;
`patrickstar.utils` has them under those names.

What is read is a copy in fp32 in memory of its own, in the shape of the parameter. What is written
reaches every place it must: a new fp32 value is rounded into the training weights, and a gradient's
norm is taken anew. An update that was left to the next forward is made first, so what is set
between two steps is what the next forward sees and what the next update starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.construct import view_of
from patrickstar.engine.contents import Training
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import ManagedParameter
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.engine.updating import follow_parameters, start_states
from patrickstar.errors import ConfigError
from patrickstar.memory import Access, Chunk, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass


def full_value(parameter: nn.Parameter) -> torch.Tensor | None:
    """The fp32 value: the master weight, or the weight itself where it is its own master.

    None if no run trains `parameter`.
    """
    return _gathered(parameter, _read_value)


def full_state(parameter: nn.Parameter, name: str) -> torch.Tensor | None:
    """The optimizer's state `name`, such as ``exp_avg``; None if no run trains `parameter`.

    Raises:
        ConfigError: the optimizer has no state of that name.
    """
    return _gathered(parameter, lambda run, aligned, slot: _read_state(run, aligned, slot, name))


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient accumulated so far, in fp32; None if there is none.

    With fp16 it is multiplied by the loss scale until the step, as `parameter.grad` is.
    """
    if not isinstance(parameter, ManagedParameter | PiecedParameter):
        return None if parameter.grad is None else parameter.grad.detach().float()
    gradient = parameter.grad
    if gradient is None:
        return None
    with torch.no_grad():
        return torch.empty(parameter.shape, device=parameter.device).copy_(gradient)


def set_full_value(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a weight another fp32 value; the training weight is rounded from it.

    Raises:
        ConfigError: no run trains `parameter`, or `value` has another shape.
    """
    _scattered(parameter, value, _write_value)


def set_full_state(parameter: nn.Parameter, value: torch.Tensor, name: str) -> None:
    """Give the optimizer's state `name` of a weight another value.

    Raises:
        ConfigError: as for `set_full_value` and `full_state`.
    """

    def write(run: Training, aligned: AlignedChunks, slot: Slot, part: torch.Tensor) -> None:
        chunk = _state_chunk(aligned, name)
        run.state.home.about_to_write([aligned.parameter.id])
        with _using(run, chunk, Access.UPDATE, *aligned.states.values()):
            flat = {state: _flat(run, state) for state in aligned.states.values()}
            start_states(run.state, aligned, run.optimizer.param_groups[aligned.group], flat)
            _view(run, chunk, slot).copy_(part)

    _scattered(parameter, value, write)


def set_full_gradient(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the accumulated gradient; clipping sees the new one.

    Raises:
        ConfigError: as for `set_full_value`.
    """
    _scattered(parameter, value, lambda run, aligned, slot, part: _write_gradient(run, slot, part))


def update_full_gradients(
    parameters: Iterable[nn.Parameter],
    update: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace each gradient by `update(gradient, parameter)`; those without one are left out."""
    for parameter in parameters:
        gradient = full_gradient(parameter)
        if gradient is not None:
            set_full_gradient(parameter, update(gradient, parameter))


def share_of(parameter: nn.Parameter) -> slice | None:
    """Which of the elements of a weight this rank keeps; None for all of them.

    Raises:
        ConfigError: the weight is kept in pieces, whose shares do not follow each other.
    """
    run = _run_of(parameter)
    ranks = None if run is None else run.state.ranks
    if run is None or ranks is None or not ranks.shards_parameters:
        return None
    if isinstance(parameter, PiecedParameter):
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is kept in pieces, and this rank has a "
            "part of each; use the functions for the full value"
        )
    aligned, slot = run.state.of(parameter)
    if aligned.alone:
        return None
    start, stop = ranks.own(aligned.parameter.numel)
    first, last = (min(max(at - slot.offset, 0), slot.numel) for at in (start, stop))
    return slice(first, last)


Read = Callable[[Training, AlignedChunks, Slot], torch.Tensor]
Write = Callable[[Training, AlignedChunks, Slot, torch.Tensor], None]


def _run_of(parameter: nn.Parameter) -> Training | None:
    home = getattr(parameter, "_home", None)
    if not isinstance(home, ChunkHome) or home.training is None:
        return None
    return home.training()


def _parts(parameter: nn.Parameter) -> list[tuple[slice, nn.Parameter]]:
    """The rows of a parameter with what holds them: itself, or its pieces."""
    if isinstance(parameter, PiecedParameter):
        return [(slice(start, stop), piece) for start, stop, piece in parameter.rows()]
    return [(slice(None), parameter)]


def _gathered(parameter: nn.Parameter, read: Read) -> torch.Tensor | None:
    run = _run_of(parameter)
    if run is None:
        return None
    parts: list[torch.Tensor] = []
    for _, part in _parts(parameter):
        aligned, slot = run.state.of(part)
        if aligned.gradient is None:  # frozen
            return None
        with _PLAIN(), torch.no_grad():
            parts.append(read(run, aligned, slot))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _scattered(parameter: nn.Parameter, value: torch.Tensor, write: Write) -> None:
    run = _run_of(parameter)
    if run is None:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no run: pass a parameter of "
            "the model that was given to initialize"
        )
    if value.shape != parameter.shape:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} was given a value of shape "
            f"{tuple(value.shape)}"
        )
    for rows, part in _parts(parameter):
        aligned, slot = run.state.of(part)
        if aligned.gradient is None:
            raise ConfigError(
                f"the parameter {slot.name!r} is frozen: it has no master weight, gradient or "
                "optimizer state; change the parameter itself"
            )
        with _PLAIN(), torch.no_grad():
            write(run, aligned, slot, value.detach()[rows])


def _read_value(run: Training, aligned: AlignedChunks, slot: Slot) -> torch.Tensor:
    chunk = aligned.master or aligned.parameter
    also = [aligned.parameter] if aligned.changed else []
    with _using(run, chunk, Access.UPDATE if also else Access.READ, *also):
        if also:
            _follow(run, aligned)
        return _view(run, chunk, slot).to(torch.float32, copy=True)


def _write_value(run: Training, aligned: AlignedChunks, slot: Slot, value: torch.Tensor) -> None:
    run.state.home.about_to_write([aligned.parameter.id])
    with _using(run, aligned.parameter, Access.UPDATE, *filter(None, [aligned.master])):
        _follow(run, aligned)
        _view(run, aligned.parameter, slot).copy_(value)
        if aligned.master is not None:
            _view(run, aligned.master, slot).copy_(value)
    torch.autograd.graph.increment_version([slot.parameter])


def _read_state(run: Training, aligned: AlignedChunks, slot: Slot, name: str) -> torch.Tensor:
    chunk = _state_chunk(aligned, name)
    if not aligned.started:
        hyper = run.optimizer.param_groups[aligned.group]
        first = next(s.init for s in run.state.rule.states(hyper) if s.name == name)
        return torch.full(slot.shape, first, device=slot.parameter.device)
    with _using(run, chunk, Access.READ):
        return _view(run, chunk, slot).to(torch.float32, copy=True)


def _write_gradient(run: Training, slot: Slot, value: torch.Tensor) -> None:
    run.gradients.set(slot.parameter, value)


def _state_chunk(aligned: AlignedChunks, name: str) -> Chunk:
    if name not in aligned.states:
        raise ConfigError(
            f"the optimizer has no state {name!r}; its states are {sorted(aligned.states)}"
        )
    return aligned.states[name]


@contextmanager
def _using(run: Training, chunk: Chunk, access: Access, *also: Chunk) -> Iterator[None]:
    """`chunk` and `also` resident where updates are made."""
    tier = run.state.update_tier
    chunks = {one.id: one for one in (chunk, *also)}
    uses = [Use(one, access if len(chunks) == 1 else Access.UPDATE, tier) for one in chunks]
    with run.state.manager.use(uses):
        yield


def _flat(run: Training, chunk: Chunk) -> torch.Tensor:
    return run.state.manager.tensor(chunk, run.state.update_tier)


def _view(run: Training, chunk: Chunk, slot: Slot) -> torch.Tensor:
    return view_of(_flat(run, chunk), slot.offset, slot.shape, slot.stride)


def _follow(run: Training, aligned: AlignedChunks) -> None:
    aligned.changed = False
    if aligned.master is not None:
        follow_parameters(_flat(run, aligned.parameter), _flat(run, aligned.master))
