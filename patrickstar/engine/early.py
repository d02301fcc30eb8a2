"""Updates that are made while the backward runs, for who asks for them.

Without clipping nothing global decides about an update, so a chunk can be updated when the last of
its gradients is there: `update_in_backward`. Gradients then live for moments instead of a whole
iteration, and what the updates read and write is spread over the backward, where the disk rests
otherwise. The bits are those of the update in `step()`.

It changes what a backward means. The one that completes an accumulation is a part of the step, and
whoever calls it promises to call `step()` next, without a change to a gradient or a hyperparameter
in between. What can be seen of a broken promise is an error: until `step()`, nobody is given the
chunks that were updated or their gradients, no forward and no backward begins, and hyperparameters
are compared. A backward that ends early after its first update leaves a torn step, as an error in
`step()` does.

Which chunks are updated so is known from the first iteration of its kind, which makes its updates
in the step and counts. A chunk is waited for until every parameter in it has had its gradient once.
Autograd completes a gradient only after all that reads the parameter, in this graph, so nothing
needs the old weights any more. Whatever is not so plain is left to `step()`: a parameter that had
no gradient or several (nested backwards), a chunk that was used after its last gradient or is
referred to, updates for which there is no room yet, backwards that the engine does not run or whose
graph is kept, and iterations that no plan was made for.

Where chunks move, the disk would have all its work in the backward and none in the forward. So the
updates that come last in the backward are put off to the next forward there (see `overlap`), as
much of them as the forward is of the computation. That moves no more bytes: their gradients come
last and are used up first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from patrickstar.engine.aligned import AlignedChunks, Slot
from patrickstar.engine.interruption import InterruptsAfterwards
from patrickstar.engine.overlap import Overlap, families, held_beside, updates_of_step
from patrickstar.engine.state import ModelState
from patrickstar.engine.updating import ChunkUpdate
from patrickstar.errors import ChunkStateError, ConfigError
from patrickstar.memory import Due, Moment, Trace

Holds = Callable[[Moment], bool]
IN_FORWARD = 0.25  # of the weights; the forward computes for about half as long as the backward


class EarlyUpdates:
    """Knows when a chunk can be updated in the backward, and plans the iterations that do it.

    Args:
        enabled: if not, nothing is ever updated early.

    Attributes:
        update: updates one chunk whose gradients are all there; whether it could. Whoever makes
            updates sets it.
        updated: indices of the parameters that were updated before their step.
    """

    def __init__(self, state: ModelState, *, enabled: bool) -> None:
        self._state, self._manager = state, state.manager
        self.enabled = enabled
        self.update: Callable[[AlignedChunks], bool] | None = None
        self.updated: set[int] = set()
        self._planned: dict[Hashable, Set[int]] = {}  # parameter chunks, by iteration
        self._now: Set[int] = frozenset()
        self._arrived: dict[int, int] = {}  # gradients of each parameter in the last backward
        self._counts = self._makes = self._ended_well = False
        self._guards: list[Due] = []
        self._hyper: dict[int, dict[str, Any]] = {}  # that were used, by parameter group

    # Iterations

    def begin(self, key: Hashable) -> None:
        """An iteration begins that repeats whenever `key` does."""
        self._now = self._planned.get(key, frozenset())
        self._arrived = {}

    def traced(self, key: Hashable, trace: Trace, overlap: Overlap) -> None:
        """An iteration of `key` has been traced and planned; plan one with early updates.

        Args:
            overlap: puts updates off that are not early.
        """
        self._planned = {k: v for k, v in self._planned.items() if k in self._manager.plans}
        self._planned.pop(key, None)
        if not self.enabled or key not in self._manager.plans:
            overlap.traced(key, trace)
            return
        plain = {
            aligned.parameter.id
            for aligned in self._state.aligned
            if all(self._arrived.get(slot.index) == 1 for slot in aligned.slots)
        }
        capacities = [tier.capacity for tier in self._manager.tiers]
        sizes = {c.id: c.nbytes for aligned in self._state.aligned for c in aligned.chunks()}
        family = families(self._state.aligned)

        tried = False
        for found in with_early_updates(trace, family, plain, sizes, capacities):
            tried = True
            if not self._manager.plan_iteration(key, found.trace):
                continue
            if overlap.traced(key, found.trace) or not found.leaves_some:
                self._planned[key] = frozenset(found.early)
                return
        if tried:
            self._manager.plan_iteration(key, trace)
        overlap.traced(key, trace)

    # Backwards

    @contextmanager
    def backward(self, *, completes: bool, planned: bool) -> Iterator[None]:
        """A backward of the engine runs.

        Args:
            completes: it is the last one before the step.
            planned: it follows the plan of its iteration.
        """
        if not self.enabled or not completes or self._counts:
            yield
            return
        self._arrived, self._counts, self._makes = {}, True, planned and bool(self._now)
        try:
            with ExitStack() as stack:
                if self._makes:
                    stack.enter_context(InterruptsAfterwards())
                self._ended_well = False
                yield
                self._ended_well = True
        finally:
            self._counts = self._makes = False
            if not self._ended_well:
                self._let_go()

    def came(self, aligned: AlignedChunks, slot: Slot) -> None:
        """A gradient has gone to its chunk, and autograd has no more of it."""
        if not self._counts:
            return
        self._arrived[slot.index] = self._arrived.get(slot.index, 0) + 1
        if not self._makes or aligned.parameter.id not in self._now:
            return
        if any(self._arrived.get(other.index) != 1 for other in aligned.slots):
            return
        assert self.update is not None
        if self.update(aligned):
            self._guard(aligned)

    def refuse_used_up(self, slot: Slot) -> None:
        """Raise if the gradient of this parameter has gone into an update that awaits its step."""
        if slot.index in self.updated and self._ended_well:
            raise ChunkStateError(
                f"the gradient of {slot.name!r} cannot be looked at or changed: with "
                "patrickstar.update_in_backward the backward has used it up. Set that to false to "
                "see gradients or to clip them"
            )

    def note(self, update: ChunkUpdate) -> None:
        """This update is about to be made."""
        self._hyper.setdefault(update.aligned.group, update.hyper)
        self.updated.update(slot.index for slot in update.slots)

    # Until the step

    @property
    def awaits_step(self) -> bool:
        """Whether a backward has made updates that no step has counted yet."""
        return bool(self.updated) and self._ended_well

    def settle(self, groups: list[dict[str, Any]]) -> None:
        """The step begins: what was updated can be used again, and no other step takes it over.

        Raises:
            ChunkStateError: hyperparameters are not those that were used.
        """
        self._let_go()
        self._ended_well = False
        for index, used in self._hyper.items():
            now = groups[index]
            changed = [name for name, value in used.items() if not _same(value, now.get(name))]
            if changed:
                raise ChunkStateError(
                    f"{changed[0]!r} of parameter group {index} was {used[changed[0]]} in the "
                    f"backward and is {now.get(changed[0])} in the step. With "
                    "patrickstar.update_in_backward the backward updates the weights, with the "
                    "hyperparameters that are set then: set them before it. Go on from a "
                    "checkpoint with load_checkpoint"
                )

    def forget(self) -> None:
        """Nothing waits for a step any more."""
        self._let_go()
        self._ended_well = False
        self._hyper.clear()
        self.updated.clear()

    def _guard(self, aligned: AlignedChunks) -> None:
        """Nobody is to see, or change, weights that are a step ahead of the others."""

        def refuse() -> None:
            raise ChunkStateError(
                f"{aligned.name} was used between the backward that updated it and step(). "
                "With patrickstar.update_in_backward call step() right after the backward that "
                "completes an accumulation, and look at weights and states after it; if the model "
                "itself uses a weight once more when its gradient is complete, set "
                "patrickstar.update_in_backward to false"
            )

        chunks = tuple(chunk.id for chunk in aligned.chunks())
        guard = Due(chunks, (), refuse, on_use=True)
        self._guards.append(guard)
        self._manager.before_next_use(guard)

    def _let_go(self) -> None:
        guards, self._guards = self._guards, []
        for guard in guards:
            self._manager.drop_due(self._manager.chunk(guard.chunks[0]))


def refuse_what_needs_all_gradients(
    *, clipping: float, scaled: bool, skips_overflow: bool, ranks: bool
) -> None:
    """Raise `ConfigError` for what decides about an update only when the backward is over."""
    beside = None
    if clipping > 0:
        beside = (
            f"gradient_clipping {clipping} needs the norm of all gradients before any of them is "
            "used: set gradient_clipping to 0"
        )
    elif scaled:
        beside = (
            "fp16 skips an update whose gradients overflow, which shows when all are there: use "
            "bf16 with bf16.check_grad_overflow false"
        )
    elif skips_overflow:
        beside = (
            "bf16.check_grad_overflow, which is true unless you say otherwise, skips an update if "
            "any gradient is not finite, which shows when all are there: set it to false"
        )
    elif ranks:
        beside = "several ranks reduce their gradients in an order of their own: use one rank"
    if beside is not None:
        raise ConfigError(
            f"patrickstar.update_in_backward updates weights while the backward runs, and {beside}"
            ", or leave patrickstar.update_in_backward out"
        )


@dataclass(frozen=True)
class EarlyTrace:
    """An iteration with updates in its backward.

    Attributes:
        early: the parameter chunks that are updated there, in order.
        leaves_some: others are to be put off to the next forward, or it is not worth it.
    """

    trace: Trace
    early: list[int]
    leaves_some: bool


def with_early_updates(
    trace: Trace,
    family: Mapping[int, int],
    plain: Set[int],
    sizes: Mapping[int, int],
    capacities: Sequence[int | None],
) -> Iterator[EarlyTrace]:
    """What an iteration can be with updates in its backward, the best first.

    Args:
        trace, family, plain: see `brought_forward`.
        capacities: budgets of the tiers in bytes.
    """

    def holds(moment: Moment) -> bool:
        return has_room(moment, sizes, capacities)

    everything = brought_forward(trace, family, plain, holds)
    if everything is None:
        return
    some = brought_forward(trace, family, first_of(everything[1], sizes), holds)
    if some is not None:
        yield EarlyTrace(*some, leaves_some=True)
    yield EarlyTrace(*everything, leaves_some=False)


def brought_forward(
    trace: Trace, family: Mapping[int, int], plain: Set[int], holds: Holds
) -> tuple[Trace, list[int]] | None:
    """The trace of an iteration that updates chunks as soon as their gradients are there.

    Args:
        trace: of an iteration whose last segment is the step that makes its updates.
        family: see `families`.
        plain: parameter chunks whose gradients come once each.
        holds: whether there is room for a moment.

    Returns:
        the trace and the parameter chunks that are updated early, in order; None if none is.
    """
    if not trace.segments or trace.segments[-1][1] != "step":
        return None
    step = trace.segments[-1][0]
    last: dict[int, int] = {}
    for index, moment in enumerate(trace.moments[:step]):
        for use in moment.uses:
            last[family.get(use.chunk, -1)] = index
        for chunk in (c for chunks in moment.held.values() for c in chunks):
            last[family.get(chunk, -1)] = index
    updates, rest = updates_of_step(trace, family)
    moved: dict[int, Moment] = {}
    early: set[int] = set()
    for of, update in updates.items():
        store = trace.moments[last.get(of, 0)]
        writes = [u for u in store.uses if u.access.writes and family.get(u.chunk) == of]
        there = replace(update, other=dict(store.other), held=held_beside(store, update.uses))
        if of in plain and writes and holds(there):
            moved[last[of]] = there
            early.add(of)
    if not early:
        return None
    moments: list[Moment] = []
    begins: list[int] = []
    for index, moment in enumerate(trace.moments[:step]):
        begins.append(len(moments))
        moments.append(moment)
        if index in moved:
            moments.append(moved[index])
    begins.append(len(moments))
    moments += [*(update for of, update in updates.items() if of not in early), *rest]
    segments = [(begins[first], name) for first, name in trace.segments]
    return Trace(moments, segments), sorted(early, key=last.__getitem__)


def first_of(early: Sequence[int], sizes: Mapping[int, int]) -> Set[int]:
    """The parameter chunks of `early`, in order, without the last, which the forward can have."""
    left = IN_FORWARD * sum(sizes[chunk] for chunk in early)
    kept = list(early)
    while kept and sizes[kept[-1]] <= left:
        left -= sizes[kept.pop()]
    return frozenset(kept)


def has_room(moment: Moment, sizes: Mapping[int, int], capacities: Sequence[int | None]) -> bool:
    """Whether what `moment` uses, what could not leave and what no chunk owns fits together."""
    for tier, capacity in enumerate(capacities[:-1]):
        there = {use.chunk for use in moment.uses if use.tier == tier}
        there.update(moment.held.get(tier, ()))
        needed = moment.other.get(tier, 0) + sum(sizes.get(chunk, 0) for chunk in there)
        if capacity is not None and needed > capacity:
            return False
    return True


def _same(used: Any, now: Any) -> bool:
    if isinstance(used, torch.Tensor) or isinstance(now, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(used), torch.as_tensor(now)))
    return bool(used == now)
