"""Iterations that repeat: the first of a kind is recorded and planned, the others follow the plan.

Bookkeeping only. The manager tells what is used and asks what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from patrickstar.memory.planner import Action, make_plan
from patrickstar.memory.playback import Playback
from patrickstar.memory.policy import Policy
from patrickstar.memory.trace import Recorder, Trace, Use

MOST_PLANS = 64  # kept; sequences of many lengths would fill memory with them
Held = Callable[[], dict[int, tuple[int, ...]]]


class Iterations:
    """Records, plans and follows iterations.

    Args:
        plan: whether repeated iterations are planned at all.
        prefetch: whether plans load chunks ahead of their use.

    Attributes:
        plans: by the key of the iteration.
        recorder: writes the trace of an iteration that has no plan.
        playback: follows the plan of one that has.
        abandoned: what had been recorded of the last iteration that ended early.
    """

    def __init__(self, policy: Policy, *, plan: bool, prefetch: bool) -> None:
        self._policy, self._plan, self._prefetch = policy, plan, prefetch
        self.plans: dict[Hashable, Playback] = {}
        self.recorder: Recorder | None = None
        self.playback: Playback | None = None
        self.abandoned: Trace | None = None
        self._last: Playback | None = None
        self._key: Hashable = None
        self._current: tuple[Use, ...] = ()

    def begin(self, key: Hashable) -> bool:
        """An iteration begins; whether it goes on with the plan of the one before."""
        self._key, self._current = key, ()
        playback = self.plans.pop(key, None)
        if playback is not None:
            self.plans[key] = playback  # the one used last is given up last
        same = playback is self._last
        self.playback = self._last = playback
        self.recorder = Recorder() if playback is None else None
        if playback is not None:
            playback.restart()
        return same

    def segment(self, name: Hashable) -> bool:
        """A part of the iteration begins; whether the plan, if any, knows it."""
        if self.recorder is not None:
            self.recorder.segment(name)
        if self.playback is None:
            return False
        if self.playback.segment(name):
            return True
        self.plans.pop(self._key, None)
        self.playback = None
        return False

    def moment(self, uses: tuple[Use, ...], held: Held) -> Sequence[Action] | None:
        """These are used now; what to do, or None if this is no new moment.

        Args:
            held: finds what could not leave though it is not used, by tier.
        """
        if uses == self._current:
            return None
        self._current = uses
        if self.recorder is not None:
            self.recorder.moment(uses, held())
        return [] if self.playback is None else self.playback.moment(uses)

    def stay(self, uses: tuple[Use, ...]) -> bool:
        """Whether these uses are no new moment."""
        return uses == self._current

    def go_on(self, uses: tuple[Use, ...], position: int) -> None:
        """The plan's moment at `position` begins with these uses; it asks for nothing."""
        assert self.playback is not None
        self._current, self.playback.position = uses, position

    def next_use(self, chunk: int, tier: int) -> tuple[int | None, bool]:
        """Moments until the next use of `chunk` on `tier`, and whether that reads it."""
        return (None, True) if self.playback is None else self.playback.next_use(chunk, tier)

    def end(self, sizes: Mapping[int, int], capacities: Sequence[int | None]) -> Trace | None:
        """The iteration is over; a first one of its kind is planned. Returns its trace, if new.

        Args:
            sizes: bytes of every chunk that is left.
            capacities: budgets of the tiers in bytes.
        """
        recorder, self.recorder, self.playback = self.recorder, None, None
        self._current = ()
        if recorder is None:
            return None
        self.plan(self._key, recorder.trace, sizes, capacities)
        return recorder.trace

    def plan(
        self,
        key: Hashable,
        trace: Trace,
        sizes: Mapping[int, int],
        capacities: Sequence[int | None],
    ) -> bool:
        """Plan iterations of this key; whether there is a plan that fits the budgets."""
        # Chunks that lived for one iteration will not be back, so neither will the iteration.
        lasting = all(use.chunk in sizes for moment in trace.moments for use in moment.uses)
        if not (self._plan and trace.moments and lasting):
            return False
        plan = make_plan(trace, sizes, capacities, self._policy, prefetch=self._prefetch)
        if plan.fits(capacities[:-1]):
            self.plans.pop(key, None)
            self.plans[key] = Playback(plan, max(len(capacities) - 1, 1))
            for oldest in list(self.plans)[:-MOST_PLANS]:
                del self.plans[oldest]
            return True
        return False

    def abandon(self) -> None:
        """The iteration ended early; no plan is made of it."""
        if self.recorder is not None:
            self.abandoned = self.recorder.trace
        self.recorder = self.playback = None
        self._current = ()
