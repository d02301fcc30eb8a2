"""The whole answer to "what if I trained this, with that config, there?".

Budgets that a config leaves open are, on another machine, nine tenths of its memories; on this one
they stay open as they would in the run, and what is there is compared with what is needed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from patrickstar.config import Config, load_config
from patrickstar.engine.device import free_budget
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import RunSettings
from patrickstar.machine import Machine, cache_folder, machine_from, machine_here
from patrickstar.planning.parallel import DataParallel, data_parallel
from patrickstar.planning.prediction import Prediction, StepPrediction, TierPrediction, predict
from patrickstar.planning.rehearsed import Inputs, Rehearsed, rehearse_run
from patrickstar.planning.timing import Measured, Seconds, roofline

Provider = Callable[[], nn.Module]
_OF_MEMORY = 0.9  # contexts, libraries, the interpreter and the data need the rest


@dataclass(frozen=True)
class WhatIf:
    """What one change would do.

    Attributes:
        change: in words.
        fits: whether it fits then.
        step_s: seconds of a step; None if it does not fit.
        speed: samples a second, as a multiple of those without the change.
        moved: bytes a step, between all tiers.
    """

    change: str
    fits: bool
    step_s: float | None
    speed: float | None
    moved: int


@dataclass(frozen=True)
class RunPlan:
    """What a run will take.

    Attributes:
        fits: whether every budget holds; on several ranks, of each at the config's stage.
        known: whether that is sure. On several ranks it may show only when they run, and `fits` is
            False then.
        machine: whose rates the step was predicted with, and where they come from.
        others: part of the processors that others used while this machine was measured.
        parameters: weights of the model.
        state_bytes: parameters, gradients, master weights and optimizer states.
        activation_bytes: the most that no chunk owns, at any moment.
        chunks, chunk_elements: how many groups of aligned chunks, and the longest.
        flops: multiplications and additions of forward and backward.
        updated_bytes: what the update reads and writes.
        tiers: bytes by tier: the budget, the smallest that works, the peak.
        moved: bytes a step, by "from->to".
        step: seconds of a step and its parts; None if it does not fit or no rates are known.
        usage: bytes of every tier in memory, moment by moment of a step.
        moments: seconds at which the moments begin.
        what_if: what changes would do.
        parallel: with more ranks than one, what they exchange and hold.
    """

    fits: bool
    known: bool
    machine: str
    source: str
    others: float
    parameters: int
    state_bytes: int
    activation_bytes: int
    chunks: int
    chunk_elements: int
    flops: int
    updated_bytes: int
    tiers: dict[str, TierPrediction]
    moved: dict[str, int]
    step: StepPrediction | None
    usage: dict[str, list[int]] = field(repr=False)
    moments: list[float] = field(repr=False)
    what_if: list[WhatIf] = field(default_factory=list)
    parallel: DataParallel | None = None

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return dataclasses.asdict(self)


def plan(
    model_provider: Provider,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *inputs: Any,
    keyword_inputs: Mapping[str, Any] | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    remeasure: bool = False,
    world_size: int = 1,
    recomputing: Provider | None = None,
    what_if: bool = True,
) -> RunPlan:
    """Say what training a model takes, without allocating it.

    Args:
        model_provider: builds the model; called with the meta device as the default.
        config: as `initialize_engine` takes it.
        inputs: of one forward; tensors of the right shapes and dtypes, on any device ("meta" takes
            no memory).
        keyword_inputs: the same by name.
        machine: a `Machine`, a file, or the name of one that is shipped; this machine by default,
            measured once and kept in the user's cache folder.
        remeasure: measure this machine again.
        world_size: ranks of a data parallel run.
        recomputing: builds the same model with recomputation switched the other way, for "what if".
        what_if: whether to try changes.

    Raises:
        ConfigError: the config, the machine or the model cannot be used.
    """
    loaded = load_config(dict(config) if isinstance(config, Mapping) else config or {})
    settings = settings_from(loaded)
    given = None
    if machine is not None:
        given = machine if isinstance(machine, Machine) else machine_from(os.fspath(machine))
        settings = on_machine(settings, loaded, given)
    elif settings.device is not None and settings.device_budget is None:
        settings = replace(settings, device_budget=free_budget(settings.device))
    asked = _Asked(settings, (inputs, keyword_inputs or {}), given, remeasure)
    run = asked.rehearsed(model_provider)
    found = asked.predicted(run)
    facts = asked.facts
    fits: bool | None = found.fits and asked.holds(found)
    parallel = None
    if world_size > 1:
        parallel = data_parallel(run, settings, facts, found, world_size)
        fits = parallel.stages[loaded.zero_optimization.stage].fits
    answer = RunPlan(
        fits=bool(fits),
        known=fits is not None,
        machine=facts.name,
        source=facts.source,
        others=facts.others,
        parameters=run.parameters,
        state_bytes=run.state_bytes,
        activation_bytes=run.activation_bytes,
        chunks=run.chunks,
        chunk_elements=run.chunk_elements,
        flops=run.work.flops,
        updated_bytes=run.update_bytes,
        tiers=found.tiers,
        moved=found.moved,
        step=found.step,
        usage=found.usage,
        moments=found.moments,
        what_if=asked.changes(model_provider, recomputing, run, found) if what_if else [],
        parallel=parallel,
    )
    asked.keep()
    return answer


def on_machine(settings: RunSettings, config: Config, machine: Machine) -> RunSettings:
    """`settings` as they would be on `machine`, with its memories for budgets that are open."""
    device, host = settings.device_budget, settings.host_budget
    update_on = settings.update_on
    if machine.accelerator is not None:
        if config.patrickstar.update == "auto":
            update_on = "device" if device is None else "host"
        if device is None:
            device = int(machine.accelerator.memory_bytes * _OF_MEMORY)
    if host is None and machine.memory_bytes is not None:
        share = machine.accelerator.count if machine.accelerator is not None else 1
        host = int(machine.memory_bytes * _OF_MEMORY / share)
    return replace(settings, device_budget=device, host_budget=host, update_on=update_on)


class _Asked:
    """The question, and what was found out for it so far."""

    def __init__(
        self, settings: RunSettings, inputs: Inputs, given: Machine | None, remeasure: bool
    ) -> None:
        self._settings, self._inputs, self._given = settings, inputs, given
        folder = None if settings.disk is None else Path(settings.disk[0])
        self.facts = machine_here(folder, remeasure=remeasure) if given is None else given
        self._measured: Measured | None = None
        self._seconds: Seconds = roofline(self.facts)
        if given is None:
            file = cache_folder() / "operators.json"
            key = (
                f"{self.facts.processor.name}, {torch.get_num_threads()}, {torch.__version__}, cold"
            )
            self._measured = Measured(self._seconds, file, key)
            self._seconds = self._measured

    def rehearsed(
        self,
        provider: Provider,
        inputs: Inputs | None = None,
    ) -> Rehearsed:
        return rehearse_run(provider, inputs or self._inputs, self._settings)

    def predicted(
        self,
        run: Rehearsed,
        settings: RunSettings | None = None,
        machine: Machine | None = None,
        known: Prediction | None = None,
        guess: bool = False,
        named: bool = True,
    ) -> Prediction:
        settings, facts = settings or self._settings, machine or self.facts
        timed = settings.device is None or facts.accelerator is not None
        if settings.disk is not None and facts.disk is None:
            timed = False
        return predict(
            run,
            settings,
            facts if timed else None,
            self._measured.guess if guess and self._measured is not None else self._seconds,
            overhead=self._measured.overhead() if self._measured is not None else None,
            known=known,
            named=named,
        )

    def holds(self, found: Prediction) -> bool:
        """Whether this machine has what tiers without budgets will take."""
        host = found.tiers["host"]
        room = self.facts.memory_bytes
        return self._given is not None or host.budget is not None or not room or host.peak <= room

    def keep(self) -> None:
        if self._measured is not None:
            self._measured.keep()

    def changes(
        self,
        provider: Provider,
        recomputing: Provider | None,
        run: Rehearsed,
        before: Prediction,
    ) -> list[WhatIf]:
        """What some changes would do to `run`, which was predicted to be `before`.

        Operators on tensors of other shapes are not timed for that, which would take longer than
        all the rest.
        """
        settings = self._settings
        found: list[WhatIf] = []

        def tried(change: str, then: Prediction, samples: int = 1) -> None:
            step = None if then.step is None else then.step.total
            speed = None
            if step and before.step is not None:
                speed = samples * before.step.total / step
            moved = sum(then.moved.values())
            found.append(WhatIf(change, then.fits and self.holds(then), step, speed, moved))

        if settings.host_budget is not None:
            more = replace(settings, host_budget=2 * settings.host_budget)
            tried("twice the host memory", self.predicted(run.under(more), more, named=False))
        if settings.device_budget is not None:
            more = replace(settings, device_budget=2 * settings.device_budget)
            tried("twice the device memory", self.predicted(run.under(more), more, named=False))
        disk = self.facts.disk
        if settings.disk is not None and disk is not None:
            faster = disk.model_copy(update={"read": 2 * disk.read, "write": 2 * disk.write})
            machine = self.facts.model_copy(update={"disk": faster})
            tried("a disk twice as fast", self.predicted(run, None, machine, before))
        if recomputing is not None:
            tried(
                "recomputation the other way",
                self.predicted(self.rehearsed(recomputing), guess=True, named=False),
            )
        larger = tree_map_only(torch.Tensor, _twice, self._inputs)
        tried(
            "a batch twice as large",
            self.predicted(self.rehearsed(provider, larger), guess=True, named=False),
            2,
        )
        return found


def _twice(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    return torch.empty((2 * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
