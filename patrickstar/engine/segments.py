"""The parts of an iteration, and what the memory manager is told about them.

An iteration runs from one optimizer step to the next and has segments: forwards, backwards, the
step. A first iteration of its kind is *watched*: the memory of every operator is measured and
room is made before it runs. A repeated one follows its plan. A forward without gradients between
two steps is an iteration of its own, so evaluation neither spoils a plan nor needs one.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from patrickstar.engine.early import EarlyUpdates
from patrickstar.engine.overlap import Overlap
from patrickstar.engine.recording import Recording
from patrickstar.engine.sharding import Sharding
from patrickstar.memory import ChunkManager
from patrickstar.memory.live import LiveStorages, WatchOperators

_MOST_FORWARDS = 4096  # without a step: somebody only looks at outputs, and no step will come


class Segments:
    """Tells `manager` where iterations and their segments begin and end.

    Args:
        device: whose memory the compute tier is.
        base: bytes on the compute tier that are always there and no chunk owns (buffers).
        overlap: knows which iterations make the updates of the one before.
        early: knows which iterations make their updates in the backward.
        allocated_peak: the most bytes that the device had given out at once since the last call, if
            it tells.
        recording: is told when iterations and segments begin and end, if there is one.
        sharding: has the chunks that several ranks share, if they do.
    """

    def __init__(
        self,
        manager: ChunkManager,
        device: torch.device,
        base: int,
        overlap: Overlap,
        early: EarlyUpdates,
        allocated_peak: Callable[[], int] | None = None,
        recording: Recording | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._sharding, self._spare = sharding, 0
        self._manager, self._overlap, self._early = manager, overlap, early
        self._key: Hashable = None
        self.base = base
        self._allocated_peak = allocated_peak
        self._chunks_before: int | None = None  # bytes, while an operator runs that is measured
        self._recording = recording
        self.device = device
        self._live = LiveStorages(manager.owns, device.type)
        self._running = False
        self.planned = False
        self._forwards = 0
        self._watching = False
        self._outer: FrameType | None = None  # who runs the segment that is running

    @contextmanager
    def forward(self, key: Hashable) -> Iterator[None]:
        """A forward with gradients; begins an iteration if none is running."""
        if not self._is_nested():
            self._forwards += 1
            if self._running and self._forwards > _MOST_FORWARDS:
                self.abandon()
            if not self._running:
                self._begin(key, "training")
        with self._segment(("forward", key), "forward"):
            yield

    @contextmanager
    def evaluation(self, key: Hashable) -> Iterator[None]:
        """A forward without gradients."""
        alone = not self._running and not self._is_nested()
        if alone:
            self._begin(("evaluation", key), "evaluation")
        with self._segment(("evaluation", key), "evaluation"):
            yield
        if alone:
            self._end(complete=False)

    @contextmanager
    def backward(self, *, completes: bool) -> Iterator[None]:
        """A backward; it `completes` an accumulation if nothing but the step comes after it."""
        if not self._running:
            self._begin("backward", "backward")
        with (
            self._segment("backward", "backward"),
            self._early.backward(completes=completes, planned=self.planned),
        ):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """The optimizer step, which ends the iteration."""
        if not self._running:
            self._begin("step", "step")
        with self._segment("step", "step", watch=False):
            yield
        self._end(complete=True)

    @contextmanager
    def updating(self, chunk: int) -> Iterator[None]:
        """The update of the weights in `chunk` is made, in the step or later."""
        began = time.perf_counter()
        yield
        if self._recording is not None:
            self._recording.updated(chunk, began, time.perf_counter())

    def abandon(self) -> None:
        """Something went wrong or nowhere; the next segment begins a new iteration."""
        self._manager.abandon_iteration()
        if self._sharding is not None:
            self._sharding.end(complete=False)
        if self._recording is not None and self._running:
            self._recording.ended_iteration(complete=False)
        self._running = False

    def may_put_off(self) -> bool:
        """Whether the step of this iteration may leave its updates to the next one."""
        return self.planned and self._overlap.may_put_off(self._key)

    def _begin(self, key: Hashable, kind: str) -> None:
        self._key = key
        planned_as, self._spare = self._overlap.begin(key), 0
        if self._sharding is not None:
            planned_as, foreseen = self._sharding.begin(planned_as, kind)
            self._spare = 0 if foreseen else self._sharding.spare
        self.planned = self._manager.begin_iteration(planned_as)
        self._early.begin(key)
        self._running, self._forwards = True, 1
        if self._recording is not None:
            self._recording.began_iteration(self._manager.plan)

    def _end(self, *, complete: bool) -> None:
        self._running = False
        trace = self._manager.end_iteration()
        if self._sharding is not None:
            self._sharding.end(complete=True, trace=trace if complete else None)
        # What the plan expected of the last moment is gone: who needs chunks now, an update that is
        # due among them, has its room.
        self._live.recount()
        self._manager.set_other(0, self.base + self._live.nbytes)
        if trace is not None:
            self._early.traced(self._key, trace, self._overlap)
        if self._recording is not None:
            self._recording.ended_iteration(complete=complete)

    @contextmanager
    def _segment(self, name: Hashable, kind: str, *, watch: bool = True) -> Iterator[None]:
        if self._is_nested():  # a module that calls the engine again: part of the outer segment
            yield
            return
        if self._sharding is not None:
            self._sharding.ranks.comm.resumed()
            self._sharding.begin_pass()
        planned = self._manager.segment(name) and self.planned
        self.planned = planned
        if self._recording is not None:
            self._recording.began_segment(kind)
        try:
            self._outer = _caller()
            with ExitStack() as stack:
                # Parameters have to see their uses, also where that is switched off: by whoever
                # calls, or by an interrupt that came when it was to be switched on again.
                stack.enter_context(torch._C._EnableTorchFunction())
                if not planned:
                    self._live.recount()
                    self._manager.set_other(0, self._beside + self._live.nbytes)
                    if watch:
                        self._watching = True
                        stack.enter_context(
                            WatchOperators(self._live, self._before_operator, self._after_operator)
                        )
                yield
            if self._recording is not None:
                self._recording.ended_segment()
        except BaseException as error:
            if self._sharding is not None:
                self._sharding.ranks.comm.stumbled(error)
            self.abandon()
            raise
        finally:
            self._outer, self._watching = None, False

    @property
    def _beside(self) -> int:
        """Bytes on the compute tier that no operator made and no chunk has."""
        return self.base + self._spare

    def _is_nested(self) -> bool:
        """Whether this is called from within a segment.

        An exception may have come before a segment could note its end; then nobody runs it.
        """
        frame = None if self._outer is None else sys._getframe(1)
        while frame is not None:
            if frame is self._outer:
                return True
            frame = frame.f_back
        return False

    def _before_operator(self, nbytes: int) -> None:
        if not self._watching:
            return
        if nbytes:
            self._manager.set_other(0, self._beside + self._live.nbytes + nbytes)
        if self._allocated_peak is not None:
            # What was given out before is no need of this operator: chunks that have made room.
            self._allocated_peak()
            self._chunks_before = self._manager.ledger.tiers[0].chunks

    def _after_operator(self) -> None:
        if not self._watching:
            return  # the mode outlived its segment, which an exception cut short
        counted = self._beside + self._live.nbytes
        if self._allocated_peak is not None and self._chunks_before is not None:
            # Scratch memory of kernels, gone again: the plan must leave room for it.
            chunks = max(self._chunks_before, self._manager.ledger.tiers[0].chunks)
            self._chunks_before = None
            peak = self._allocated_peak() - chunks
            if peak > counted:
                self._manager.set_other(0, peak)
        self._manager.set_other(0, counted)


def _caller() -> FrameType | None:
    """The frame that a segment was entered from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, contextlib.__file__):
        frame = frame.f_back
    return frame


def signature(module: torch.nn.Module, args: Any, kwargs: Any) -> Hashable:
    """What a forward's memory use depends on: shapes and dtypes of its inputs, and the mode."""
    leaves, structure = tree_flatten((args, kwargs))
    kinds = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    )
    return (kinds, str(structure), module.training)
