"""One rehearsal for every layout: the trace of single parameters, seen through chunks.

A rehearsal is made as if each parameter lay in a chunk of its own. Which parameters share a chunk
depends on the layout, and that depends on budgets; what the operators do does not. So the trace for
any layout follows from the one rehearsal, without running the model again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from patrickstar.engine.state import ModelState
from patrickstar.engine.updating import update_uses
from patrickstar.memory import Access, Moment, Trace, Use


def parameter_alone(index: int) -> int:
    """The chunk of the parameter of this slot index, when each has its own."""
    return 2 * index


def gradient_alone(index: int) -> int:
    """The chunk of its gradient."""
    return 2 * index + 1


def repeated(alone: Trace, times: int) -> Trace:
    """`alone` with so many forwards and backwards before its step."""
    step = len(alone.moments) - 1
    moments = alone.moments[:step] * times + alone.moments[step:]
    segments = [
        (first + step * time, name)
        for time in range(times)
        for first, name in alone.segments
        if first < step
    ]
    later = step * (times - 1)
    segments += [(first + later, name) for first, name in alone.segments if first >= step]
    return Trace(moments, segments)


def grouped(alone: Trace, state: ModelState) -> tuple[Trace, list[int]]:
    """`alone` with the chunks of `state`, and with its updates at the end.

    Args:
        alone: from `parameter_alone` and `gradient_alone`; its last moment is the step, without
            uses.

    Returns:
        the trace, and for every moment of `alone` the one that it is part of.
    """
    chunk_of: dict[int, int] = {}
    for aligned, slot in state.slots.values():
        chunk_of[parameter_alone(slot.index)] = aligned.parameter.id
        if aligned.gradient is not None:
            chunk_of[gradient_alone(slot.index)] = aligned.gradient.id
    gradients = {a.gradient.id for a in state.aligned if a.gradient is not None}
    moments: list[Moment] = []
    places: list[int] = []
    filled: set[int] = set()
    now: tuple[Use, ...] | None = None
    for moment in alone.moments:
        uses = _uses(moment, chunk_of, gradients, filled)
        if uses == now:
            other = moments[-1].other
            for tier, nbytes in moment.other.items():
                other[tier] = max(other.get(tier, 0), nbytes)
        else:
            now = uses
            held = _held(moment, chunk_of, uses)
            moments.append(Moment(uses, dict(moment.other), held=held))
        places.append(len(moments) - 1)
    step = moments.pop()  # the updates stand in its place
    moments += [
        Moment(uses, dict(step.other), (gradient,)) for uses, gradient in updates_of(state)
    ] or [step]
    segments = [(places[min(first, len(places) - 1)], name) for first, name in alone.segments]
    return Trace(moments, segments), places


def with_gradients_once(alone: Trace, state: ModelState) -> frozenset[int]:
    """The parameter chunks whose parameters have one gradient each in `alone`."""
    come = Counter(use.chunk for moment in alone.moments for use in moment.uses)
    return frozenset(
        aligned.parameter.id
        for aligned in state.aligned
        if all(come[gradient_alone(slot.index)] == 1 for slot in aligned.slots)
    )


def updates_of(state: ModelState) -> list[tuple[tuple[Use, ...], int]]:
    """The uses of every update of a step, and the gradient chunk that it gives up."""
    return [
        (update_uses(aligned, state.update_tier, remade=True), aligned.gradient.id)
        for aligned in state.aligned
        if aligned.gradient is not None
    ]


def _uses(
    moment: Moment, chunk_of: Mapping[int, int], gradients: set[int], filled: set[int]
) -> tuple[Use, ...]:
    found: dict[Use, None] = {}
    for use in moment.uses:
        chunk, access = chunk_of[use.chunk], use.access
        if chunk in gradients and access.writes:  # the first gradient of a chunk begins it anew
            access = Access.UPDATE if chunk in filled else Access.OVERWRITE
            filled.add(chunk)
        found[Use(chunk, access, use.tier)] = None
    return tuple(found)


def _held(
    moment: Moment, chunk_of: Mapping[int, int], uses: tuple[Use, ...]
) -> dict[int, tuple[int, ...]]:
    used = {use.chunk for use in uses}
    held = {
        tier: tuple(dict.fromkeys(c for a in alone if (c := chunk_of[a]) not in used))
        for tier, alone in moment.held.items()
    }
    return {tier: chunks for tier, chunks in held.items() if chunks}
