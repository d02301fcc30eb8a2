"""The optimizer that users step: an ordinary `torch.optim.Optimizer` whose state lives in chunks.

Parameter groups, hyperparameters and learning-rate schedulers work as with any other. A step walks
the chunks in order, fetches what one chunk's update needs, and gives its gradients up afterwards:
`step` consumes the gradients, so nothing of them is carried to a lower tier for a `zero_grad` that
would only forget them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from patrickstar.engine.gradients import Gradients
from patrickstar.engine.interruption import InterruptsAfterwards
from patrickstar.engine.segments import Segments
from patrickstar.engine.state import AlignedChunks, ModelState, Slot
from patrickstar.engine.stepping import Stepping
from patrickstar.errors import ChunkStateError, ConfigError
from patrickstar.memory import Access, Use
from patrickstar.optim import GradScale, Run, Scratch


class Counters(Protocol):
    """Counts steps and knows where a gradient accumulation ends."""

    global_steps: int
    skipped_steps: int

    def accumulation_is_complete(self) -> bool: ...

    def note_step(self) -> None: ...

    def restart_accumulation(self) -> None: ...


class BeforeUpdates(Protocol):
    """Copies chunks before a step changes them."""

    def before_update(self, aligned: AlignedChunks) -> None: ...

    def copy_rest(self) -> None: ...


class ChunkedOptimizer(torch.optim.Optimizer):
    """Updates the weights of a `ModelState`.

    Args:
        groups: parameter groups as `torch.optim` takes them.
        counters: what counts steps and knows where an accumulation ends.
        stepping: decides about scale, clipping and overflow.

    Attributes:
        torn: a step ended early: some weights are of that step and some of the one before.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        state: ModelState,
        gradients: Gradients,
        counters: Counters,
        stepping: Stepping,
        segments: Segments,
    ) -> None:
        super().__init__(groups, defaults)
        self.model_state = state
        self._gradients = gradients
        self._counters, self._stepping, self._segments = counters, stepping, segments
        self._scratch = Scratch()
        self.snapshot: BeforeUpdates | None = None
        self.torn = False

    @property
    def stepping(self) -> Stepping:
        """What decides about scale, clipping, overflow and the schedule."""
        return self._stepping

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm at the last step, before clipping."""
        return self._stepping.grad_norm

    def schedule_with(self, scheduler: Any) -> None:
        """Step `scheduler` after every update that was made."""
        self._stepping.scheduler = scheduler

    @property
    def applied(self) -> bool:
        """Whether the last step made its update."""
        return self._stepping.applied

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights, at the end of a gradient accumulation; before it, do nothing.

        Args:
            closure: evaluated first if given, with gradients enabled; its value is returned.

        Raises:
            ChunkStateError: gradients or weights are not those of one whole backward and step,
                because something ended early.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._counters.note_step()
        if not self._counters.accumulation_is_complete():
            return loss
        self.refuse_what_was_cut_short()
        if self._gradients.incomplete:
            raise ChunkStateError(
                "the last backward ended early, so the gradients are not those of a whole batch. "
                "Drop them with optimizer.zero_grad() and run forward and backward again"
            )
        with InterruptsAfterwards():
            self.torn = True
            with self._segments.step():
                scale = self._update_all()
            self._stepping.after(scale is not None)
            self._counters.global_steps += 1
            self._counters.skipped_steps += int(scale is None)
            self.torn = False
        return loss

    def refuse_what_was_cut_short(self) -> None:
        """Raise if the weights are not those of one step."""
        if self.torn:
            raise ChunkStateError(
                "the last optimizer step ended early: some weights are of that step and some of "
                "the one before. Go on from a checkpoint with load_checkpoint"
            )

    def _update_all(self) -> GradScale | None:
        self._gradients.collect_rewritten()
        scale = self._stepping.before()
        if scale is not None:
            for aligned in self.model_state.aligned:
                if aligned.gradient is not None and any(s.has_grad for s in aligned.slots):
                    self._update(aligned, scale)
        self._gradients.clear()
        if self.snapshot is not None:
            self.snapshot.copy_rest()
            self.snapshot = None
        return scale

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are laid out in chunks when the engine is made; later ones are refused.

        Raises:
            ConfigError: the engine exists already.
        """
        if hasattr(self, "model_state"):
            raise ConfigError(
                "add_param_group came after initialize_engine: the weights of every group are "
                "laid out in chunks by then, and a new group would never be updated. Give all "
                "groups as param_groups=... (a group that starts later can have lr 0 until then)"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, except in the middle of a gradient accumulation.

        After a backward that ended early they are forgotten there too, and the accumulation begins
        anew.
        """
        incomplete = self._gradients.incomplete
        if incomplete or self._counters.accumulation_is_complete():
            self._gradients.clear()
        if incomplete:
            self._counters.restart_accumulation()

    def _update(self, aligned: AlignedChunks, scale: GradScale) -> None:
        manager, state = self.model_state.manager, self.model_state
        tier = state.update_tier
        assert aligned.gradient is not None
        uses = [Use(aligned.gradient.id, Access.READ, tier)]
        uses.append(Use(aligned.parameter.id, self._parameter_access(aligned), tier))
        if aligned.master is not None:
            uses.append(Use(aligned.master.id, Access.UPDATE, tier))
        uses += [Use(chunk.id, Access.UPDATE, tier) for chunk in aligned.states.values()]
        hyper = self.param_groups[aligned.group]
        with manager.use(uses):
            if self.snapshot is not None:
                self.snapshot.before_update(aligned)
            if aligned.changed:
                follow_parameters(state, aligned)
            start_states(state, aligned, hyper)
            for slot in aligned.slots:
                slot.step += int(slot.has_grad)
            runs = list(self._runs(aligned))
            state.rule.apply(runs, hyper, grad_scale=scale, scratch=self._scratch)
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version(
                [slot.parameter for slot in aligned.slots if slot.has_grad]
            )
        self._gradients.clear_chunk(aligned)

    @staticmethod
    def _parameter_access(aligned: AlignedChunks) -> Access:
        """Parameters that are all made anew from their masters need not be there before.

        So once the backward is through with them they can leave without being saved, and their
        room is free for what the step needs.
        """
        remade = aligned.master is not None and all(slot.has_grad for slot in aligned.slots)
        return Access.OVERWRITE if remade and not aligned.changed else Access.UPDATE

    def _runs(self, aligned: AlignedChunks) -> Iterator[Run]:
        """The contiguous ranges whose parameters have gradients and share a step count."""
        manager, tier = self.model_state.manager, self.model_state.update_tier
        assert aligned.gradient is not None
        for slots in _alike(aligned.slots):
            start, stop = slots[0].offset, slots[-1].offset + slots[-1].numel
            whole = len(slots) == len(aligned.slots)

            def flat(chunk: Any, start: int = start, stop: int = stop) -> torch.Tensor:
                return manager.tensor(chunk, tier)[start:stop]

            yield Run(
                flat(aligned.parameter),
                flat(aligned.gradient),
                None if aligned.master is None else flat(aligned.master),
                {name: flat(chunk) for name, chunk in aligned.states.items()},
                slots[0].step,
                aligned.layout() if whole else aligned.layout().cut(start, stop),
            )


def _alike(slots: list[Slot]) -> Iterator[list[Slot]]:
    run: list[Slot] = []
    for slot in slots:
        if run and (not slot.has_grad or slot.step != run[0].step):
            yield run
            run = []
        if slot.has_grad:
            run.append(slot)
    if run:
        yield run


def start_states(state: ModelState, aligned: AlignedChunks, hyper: dict[str, Any]) -> None:
    """Give states their first values before the first update; the caller holds their chunks."""
    if aligned.started:
        return
    aligned.started = True
    for specification in state.rule.states(hyper):
        if specification.init:
            chunk = aligned.states[specification.name]
            state.manager.tensor(chunk, state.update_tier).fill_(specification.init)


def follow_parameters(state: ModelState, aligned: AlignedChunks) -> None:
    """Let the masters follow parameters that were changed from Python since the last update.

    Where a parameter is still the rounding of its master, nobody changed it and the master keeps
    its full precision.
    """
    aligned.changed = False
    if aligned.master is None:
        return
    parameter = state.manager.tensor(aligned.parameter, state.update_tier)
    master = state.manager.tensor(aligned.master, state.update_tier)
    differs = parameter != master.to(parameter.dtype)
    if bool(differs.any()):
        torch.where(differs, parameter.float(), master, out=master)
