"""Updates that overlap with the next forward.

A step that clips can begin only when the backward has ended, and then the disk works while the
processor waits for it. So `step()` decides (the factors, the hyperparameters, the step counts) and
puts the update of each chunk off until its weights are used next, which is in the next forward:
what the update reads and writes is spread over a pass that computes, and the plan brings it ahead.
Weights that were updated for a use are there for it, too, and need not be brought again.

Nobody can see the delay. The memory manager makes an update that is due before it gives out any
chunk that takes part, whoever asks: an operator, `state_dict`, a checkpoint, a look at `p.data`. An
update is put off only if nothing refers to its chunks past the manager (a NumPy array over a
weight, say). A forward that no plan with updates in it was made for finds all of them made.

A plan is made from the trace of an iteration that made its updates in the step: `overlapped` moves
each to where it will happen. If that plan does not fit the budgets, or nothing moves anyway,
nothing is put off, so the smallest budget that works stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from patrickstar.engine.aligned import AlignedChunks
from patrickstar.engine.state import ModelState
from patrickstar.engine.updating import ChunkUpdate
from patrickstar.memory import Due, Moment, Trace, Use


class Overlap:
    """Puts updates off, and plans the iterations that make them.

    Args:
        enabled: if not, nothing is ever put off.
    """

    def __init__(self, state: ModelState, *, enabled: bool) -> None:
        self._state, self._manager = state, state.manager
        self._enabled = enabled

    # Iterations

    def begin(self, key: Hashable) -> Hashable:
        """An iteration that repeats whenever `key` does is about to begin; its key with updates.

        If none was planned with the updates that are due, they are made first.
        """
        if not self._manager.has_due():
            return key
        if _with_updates(key) in self._manager.plans:
            return _with_updates(key)
        self._manager.do_due()
        return key

    def traced(self, key: Hashable, trace: Trace) -> bool:
        """An iteration of `key` has been traced and planned; plan one that overlaps, if it can."""
        playback = self._manager.plans.get(key)
        if not self._enabled or playback is None or not playback.plan.moves:
            return False
        found = overlapped(trace, families(self._state.aligned))
        return found is not None and self._manager.plan_iteration(_with_updates(key), found)

    def may_put_off(self, key: Hashable) -> bool:
        """Whether the updates that end an iteration of `key` can be left to the next."""
        return self._enabled and _with_updates(key) in self._manager.plans

    # Updates

    def put_off(self, update: ChunkUpdate, work: Callable[[], None]) -> bool:
        """Leave an update to the next use of its weights, if nobody can tell; whether that is so.

        Args:
            work: makes the update when its chunks are there.
        """
        aligned, tier = update.aligned, self._state.update_tier
        if aligned.changed or aligned.gradient is None:
            return False
        if any(self._manager.is_in_use(chunk) for chunk in aligned.chunks()):
            return False
        chunks = tuple(chunk.id for chunk in aligned.chunks())
        self._manager.before_next_use(
            Due(chunks, update.uses(tier), work, dead=(aligned.gradient.id,))
        )
        return True


def _with_updates(key: Hashable) -> Hashable:
    return ("updates, then", key)


def families(aligned: Sequence[AlignedChunks]) -> dict[int, int]:
    """For each chunk that an update touches, the parameter chunk that it goes with."""
    return {
        chunk.id: chunks.parameter.id
        for chunks in aligned
        if chunks.gradient is not None
        for chunk in chunks.chunks()
    }


def overlapped(trace: Trace, family: Mapping[int, int]) -> Trace | None:
    """The trace of an iteration that makes the updates of the one before it where they are due.

    Args:
        trace: of an iteration whose last segment is the step that makes its updates.
        family: see `families`.

    Returns:
        None if the trace does not end with a step.
    """
    if not trace.segments or trace.segments[-1][1] != "step":
        return None
    step = trace.segments[-1][0]
    updates, rest = updates_of_step(trace, family)
    moments: list[Moment] = []
    begins: dict[int, int] = {}  # where a moment of the trace, with what is due before it, went
    for index, moment in enumerate(trace.moments[:step]):
        begins[index] = len(moments)
        for use in moment.uses:
            due = updates.pop(family.get(use.chunk, -1), None)
            if due is not None:
                before = moments[-1] if moments else moment
                moments.append(
                    replace(due, other=dict(before.other), held=held_beside(moment, due.uses))
                )
        moments.append(moment)
    begins[step] = len(moments)
    # Weights that nobody uses wait until the step.
    moments += [*updates.values(), *rest]
    segments = [(begins[first], name) for first, name in trace.segments]
    return Trace(moments, segments)


def updates_of_step(
    trace: Trace, family: Mapping[int, int]
) -> tuple[dict[int, Moment], list[Moment]]:
    """What the last segment of `trace` does: its updates, by parameter chunk, and the rest.

    Args:
        family: see `families`.
    """
    updates: dict[int, Moment] = {}
    rest: list[Moment] = []
    for moment in trace.moments[trace.segments[-1][0] :]:
        touched = {family.get(use.chunk, -1) for use in moment.uses}
        (of,) = touched if len(touched) == 1 else (-1,)
        if of >= 0 and len(moment.uses) > 1 and of not in updates:
            updates[of] = replace(moment, blanked=_own(moment))
        else:
            rest.append(moment)
    return updates, rest


def _own(moment: Moment) -> tuple[int, ...]:
    """What of the contents that died was the update's; the end of a step gives up all gradients."""
    used = {use.chunk for use in moment.uses}
    return tuple(dict.fromkeys(chunk for chunk in moment.blanked if chunk in used))


def held_beside(moment: Moment, uses: Sequence[Use]) -> dict[int, tuple[int, ...]]:
    """What could not leave at `moment`, apart from `uses`."""
    used = {(use.chunk, use.tier) for use in uses}
    left = {
        tier: tuple(chunk for chunk in chunks if (chunk, tier) not in used)
        for tier, chunks in moment.held.items()
    }
    return {tier: chunks for tier, chunks in left.items() if chunks}


__all__ = ["Overlap", "families", "held_beside", "overlapped", "updates_of_step"]
