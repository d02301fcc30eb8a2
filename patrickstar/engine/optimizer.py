"""The optimizer that users step: an ordinary `torch.optim.Optimizer` whose state lives in chunks.

Parameter groups, hyperparameters and learning-rate schedulers work as with any other. A step walks
the chunks in order, fetches what one chunk's update needs, and gives its gradients up afterwards,
or puts the update off until the weights are used next (see `overlap`). `step` consumes the
gradients either way: they are None afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.early import EarlyUpdates
from patrickstar.engine.gradients import Gradients
from patrickstar.engine.interruption import InterruptsAfterwards
from patrickstar.engine.modes import ModesKept
from patrickstar.engine.optimizer_state import gather, scatter
from patrickstar.engine.overlap import Overlap
from patrickstar.engine.refreshing import Refresher
from patrickstar.engine.refusal import refuse_what_would_not_repeat
from patrickstar.engine.segments import Segments
from patrickstar.engine.state import ModelState
from patrickstar.engine.stepping import Stepping
from patrickstar.engine.updating import ChunkUpdate
from patrickstar.errors import BudgetError, ChunkStateError, ConfigError
from patrickstar.optim import GradScale, Scratch


class Counters(Protocol):
    """Counts steps and knows where a gradient accumulation ends."""

    global_steps: int
    skipped_steps: int

    def accumulation_is_complete(self) -> bool: ...

    def note_step(self) -> None: ...

    def restart_accumulation(self) -> None: ...

    def refusal(self, error: BudgetError) -> BudgetError: ...

    def stepping(self) -> AbstractContextManager[None]: ...


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
        overlap: puts updates off to the next forward.
        early: makes updates in the backward.

    Attributes:
        torn: a step ended early: some weights are of that step and some of the one before.
        closed: the engine is closed.
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
        overlap: Overlap,
        early: EarlyUpdates,
    ) -> None:
        super().__init__(groups, defaults)
        self.model_state = state
        self._gradients = gradients
        self._counters, self._stepping, self._segments = counters, stepping, segments
        self._overlap, self._early = overlap, early
        early.update = self._update_early
        ranks = state.ranks
        whole = ranks is not None and ranks.shards_states and not ranks.shards_parameters
        self._refresher = Refresher(state.manager, ranks) if ranks is not None and whole else None
        self._scratch = Scratch()
        self.snapshot: BeforeUpdates | None = None
        self.torn = self.closed = False
        self._frozen = [
            (slot.name, slot.parameter)
            for aligned in state.aligned
            for slot in aligned.slots
            if aligned.gradient is None and not slot.parameter.requires_grad
        ]

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
                because something ended early; or the engine is closed.
            ConfigError: a parameter requires a gradient that did not when the engine was made.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_when_over()
        with ModesKept(self._segments.device), self._counters.stepping():
            self._counters.note_step()
            if self._counters.accumulation_is_complete():
                self._step()
        return loss

    def _step(self) -> None:
        self._refuse_unfrozen()
        if self._gradients.incomplete:
            raise ChunkStateError(
                "the last backward ended early, so the gradients are not those of a whole batch. "
                "Drop them with optimizer.zero_grad() and run forward and backward again"
            )
        try:
            refuse_what_would_not_repeat(self.model_state, self.model_state.manager.recorded)
        except BudgetError as error:
            raise self._counters.refusal(error) from error
        with InterruptsAfterwards():
            self.torn = True
            try:
                with self._segments.step():
                    scale = self._update_all()
            except BudgetError as error:
                raise self._counters.refusal(error) from error
            self._stepping.after(scale is not None)
            self._counters.skipped_steps += int(scale is None)
            # In one statement: between the two, a whole step would look torn, or not be counted.
            self._counters.global_steps, self.torn = self._counters.global_steps + 1, False

    def refuse_when_over(self) -> None:
        """Raise if the engine is closed, or the weights are not those of one step."""
        self._refuse_when_over()
        if self._early.awaits_step:
            raise ChunkStateError(
                "the last backward completed an accumulation and has updated weights already "
                "(patrickstar.update_in_backward); call step() before anything else"
            )

    def give_up_step(self) -> None:
        """Weights that a backward has updated wait for no step any more."""
        self._early.forget()

    def _refuse_when_over(self) -> None:
        if self.closed:
            raise ChunkStateError(
                "this engine is closed. The module it had is an ordinary one again where its "
                "parameters fit in memory: use engine.module, or make a new engine to train on"
            )
        if self.torn and not self._early.awaits_step:
            raise ChunkStateError(
                "the last optimizer step ended early: some weights are of that step and some of "
                "the one before. Go on from a checkpoint with load_checkpoint"
            )

    def _refuse_unfrozen(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            thawed = [(name, p) for name, p in self._frozen if p.requires_grad]
            for _, parameter in thawed:
                parameter.grad = None
        if thawed:
            raise ConfigError(
                f"{len(thawed)} parameters were frozen when the engine was made and require a "
                f"gradient now, {thawed[0][0]!r} among them: they have no place for gradients and "
                "optimizer states, and would never be trained. Make the engine with "
                "requires_grad=True on everything that is trained at some time, and freeze it "
                "afterwards until then"
            )

    def _update_all(self) -> GradScale | None:
        self._early.settle(self.param_groups)
        self.model_state.manager.do_due()
        self._gradients.complete()
        scale = self._stepping.before()
        if scale is not None:
            later = self.snapshot is None and self._segments.may_put_off()
            for aligned in self.model_state.aligned:
                if aligned.gradient is not None and any(s.has_grad for s in aligned.slots):
                    update = ChunkUpdate.decide(aligned, self.param_groups[aligned.group], scale)
                    if not (later and self._put_off(update)):
                        self._update(update)
        if self._refresher is not None:
            self._refresher.finish()
        self._gradients.clear()
        self._early.forget()
        if self.snapshot is not None:
            self.snapshot.copy_rest()
            self.snapshot = None
        return scale

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients so far by their global 2-norm, in place of the config's clipping.

        It stands for `torch.nn.utils.clip_grad_norm_` over all parameters, with the same bits. The
        gradients themselves stay as they are: the coming step multiplies them as it reads them.

        Args:
            max_norm: the largest norm; infinity only measures.

        Returns:
            the norm before clipping, without the loss scale.
        """
        if self._early.enabled and math.isfinite(max_norm):
            raise ChunkStateError(
                f"clip_grad_norm_({max_norm}) comes too late: with patrickstar.update_in_backward "
                "the backward has used the gradients. Set that to false to clip"
            )
        self._gradients.complete()
        return self._stepping.clip_next(max_norm)

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

    def state_dict(self) -> dict[str, Any]:
        """Moments and hyperparameters in the form of `torch.optim`; see `engine.optimizer_state`.

        They are copied out of the chunks into ordinary memory, all of them; `save_checkpoint`
        writes them with the rest of the run and needs no memory for it.

        Raises:
            ChunkStateError: the engine is closed, or a step ended early.
        """
        self.refuse_when_over()
        return gather(self.model_state, self.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or of the same kind in `torch.optim`.

        Raises:
            CheckpointError: it does not fit; nothing has been changed then.
        """
        self.refuse_when_over()
        scatter(self.model_state, self.param_groups, state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, except in the middle of a gradient accumulation.

        After a backward that ended early they are forgotten there too, and the accumulation begins
        anew.

        Raises:
            ChunkStateError: the last backward has used some of them already.
        """
        if self._early.awaits_step:
            self.refuse_when_over()
        with ModesKept(self._segments.device):
            incomplete = self._gradients.incomplete
            if incomplete or self._counters.accumulation_is_complete():
                self._gradients.clear()
            if incomplete:
                self._counters.restart_accumulation()

    def _update(self, update: ChunkUpdate) -> None:
        with self.model_state.manager.use(update.uses(self.model_state.update_tier)):
            if self.snapshot is not None:
                self.snapshot.before_update(update.aligned)
            update.count()
            self._make(update)
        self._gradients.clear_chunk(update.aligned)
        if self._refresher is not None and not update.aligned.alone:
            self._refresher.start(update.aligned)

    def _update_early(self, aligned: AlignedChunks) -> bool:
        """Update `aligned` in the backward, if that can be done now."""
        manager, state = self.model_state.manager, self.model_state
        if aligned.changed or any(manager.is_in_use(chunk) for chunk in aligned.chunks()):
            return False
        scale = self._stepping.of_early_updates()
        update = ChunkUpdate.decide(aligned, self.param_groups[aligned.group], scale)
        with ExitStack() as stack:
            for device in {"cpu", self._segments.device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            try:
                stack.enter_context(manager.use(update.uses(state.update_tier)))
            except BudgetError:
                return False  # nothing has changed, and there may be room in the step
            self.torn = True  # until the step
            self._early.note(update)
            if self.snapshot is not None:
                self.snapshot.before_update(aligned)
            update.count()
            self._make(update)
        self._gradients.clear_chunk(aligned)
        return True

    def _make(self, update: ChunkUpdate) -> None:
        with self._segments.updating(update.aligned.parameter.id):
            update.make(self.model_state, self._scratch)

    def _put_off(self, update: ChunkUpdate) -> bool:
        made = False

        def work() -> None:
            nonlocal made
            with InterruptsAfterwards(), ExitStack() as stack:
                if made:  # an interrupt came before anybody could note it
                    return
                # Whoever uses the weights may be anywhere, also where results would be others.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                for device in {"cpu", self._segments.device.type}:
                    stack.enter_context(torch.autocast(device, enabled=False))
                self.torn = True
                self._make(update)
                made, self.torn = True, False

        if not self._overlap.put_off(update, work):
            return False
        update.count()
        return True
