"""From a model provider and a config to an engine and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from patrickstar.engine.ahead import Ahead, bring_in, take_over
from patrickstar.engine.alike import (
    refuse_other_models,
    refuse_other_settings,
    take_first_ranks,
)
from patrickstar.engine.alone import (
    names_alone,
    refuse_late_marks,
    refuse_what_cannot_be_alone,
    stored_names,
    warn_of_copies,
)
from patrickstar.engine.construct import DEFAULT_PIECE_SIZE, Nursery, build
from patrickstar.engine.device import allocated_peak, free_budget, move_unmanaged
from patrickstar.engine.early import EarlyUpdates, refuse_what_needs_all_gradients
from patrickstar.engine.engine import Engine
from patrickstar.engine.gradients import Gradients
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.leftovers import set_aside
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.overlap import Overlap
from patrickstar.engine.pieces import PiecedParameter, rehome
from patrickstar.engine.precision import Precision
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.recorded_run import RecordedRun
from patrickstar.engine.reducing import GradientReducer
from patrickstar.engine.region_inputs import RegionInputs
from patrickstar.engine.segments import Segments
from patrickstar.engine.sharding import Sharding
from patrickstar.engine.sizing import (
    dtypes_of,
    refuse_what_cannot_fit,
    refused_to_build,
    specification_of,
)
from patrickstar.engine.split import refuse_what_cannot_be_split
from patrickstar.engine.state import ModelState
from patrickstar.engine.stepping import ShardNorms, Stepping
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.memory import ChunkManager, CpuTier, DiskTier, Policy, Spool, Tier
from patrickstar.memory.accelerator import AcceleratorTier
from patrickstar.memory.pinned import PinnedTier, no_lock, page_lock
from patrickstar.optim import UpdateRule

_MOST_NAMES = 8  # of the weights of a chunk, in the facts of a recorded run
ParamGroups = Callable[[nn.Module], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class RunSettings:
    """Everything the engine needs to know of a config, resolved."""

    precision: Precision
    rule: UpdateRule
    hyper: dict[str, Any]
    clipping: float
    accumulation_steps: int
    device_budget: int | None
    host_budget: int | None
    disk: tuple[str | os.PathLike[str], int | None] | None
    chunk_limit: int | None
    policy: Policy
    plan: bool
    prefetch: bool
    grad_dtype: torch.dtype
    round_masters: bool
    groups_of: ParamGroups | None = None  # what the optimizer makes of a model where none are given
    exact: bool = False
    skip_overflow: bool = False
    piece_size: int = DEFAULT_PIECE_SIZE
    overlap_update: bool = True
    update_in_backward: bool = False
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    device: torch.device | None = None  # an accelerator; None computes in CPU memory
    pin_host: bool = True  # page-lock the host's memory for it
    update_on: Literal["host", "device"] = "host"
    verify_disk: bool = True  # checksums of what goes to the disk tier
    record: Path | None = None  # a folder that the run is recorded into
    carry_inputs: bool = False  # what checkpointed regions keep goes to the host, in chunks
    ranks: Ranks | None = None  # those that train together, if they are several

    def __post_init__(self) -> None:
        if self.update_in_backward:
            refuse_what_needs_all_gradients(
                clipping=self.clipping,
                scaled=self.precision.scaler is not None,
                skips_overflow=self.skip_overflow,
                ranks=self.ranks is not None,
            )


def make_engine(
    provider: Callable[[], nn.Module] | nn.Module,
    settings: RunSettings,
    param_groups: ParamGroups | None = None,
) -> tuple[Engine, ChunkedOptimizer]:
    """Build the model into chunks and wrap it."""
    ahead = take_over(provider, settings)
    record: RecordedRun | None = None
    if ahead is not None and settings.device is None:
        manager = ahead.manager
    else:
        tiers = make_tiers(settings)
        record = None if settings.record is None else RecordedRun(settings.record, tiers)
        manager = make_manager(settings, tiers, record)
    try:
        return _assemble(provider, settings, param_groups, manager, ahead, record)
    except BaseException:
        manager.close()
        if record is not None:
            record.close()
        raise
    finally:
        if ahead is not None:
            ahead.close()


def make_manager(
    settings: RunSettings, tiers: list[Tier], record: RecordedRun | None = None
) -> ChunkManager:
    """A memory manager over `tiers`, with the policy of a run."""
    return ChunkManager(
        tiers,
        policy=settings.policy,
        plan=settings.plan,
        prefetch=settings.prefetch,
        observer=None if record is None else record.recording,
    )


def make_tiers(settings: RunSettings) -> list[Tier]:
    """The tiers of a run, fastest first."""
    tiers: list[Tier] = []
    device, budget = settings.device, settings.device_budget
    if device is not None:
        budget = free_budget(device) if budget is None else budget
        tiers.append(AcceleratorTier("device", budget, device))
        lock = page_lock(device) if settings.pin_host else no_lock
        tiers.append(PinnedTier("host", settings.host_budget, lock))
    else:
        if budget is not None:
            tiers.append(CpuTier("device", budget))
        tiers.append(CpuTier("host", settings.host_budget))
    if settings.disk is not None:
        tiers.append(DiskTier("disk", Spool(*settings.disk, verify=settings.verify_disk)))
    return tiers


def _assemble(
    provider: Callable[[], nn.Module] | nn.Module,
    settings: RunSettings,
    param_groups: ParamGroups | None,
    manager: ChunkManager,
    ahead: Ahead | None,
    record: RecordedRun | None,
) -> tuple[Engine, ChunkedOptimizer]:
    same = ahead is not None and ahead.manager is manager
    home = ahead.home if same and ahead is not None else ChunkHome(manager)
    sharding = None
    if settings.ranks is not None:
        refuse_other_settings(settings, settings.ranks)
        _refuse_whole_tensor_rules(settings, settings.ranks)
        sharding = Sharding(manager, settings.ranks)
    with _nursery(manager, home, settings, ahead, sharding) as nursery:
        module = _built(provider, nursery, settings, param_groups)
        _refuse_what_is_split(module, home, settings)
        settings.precision.cast_buffers(module)
        if settings.device is not None:
            move_unmanaged(module, settings.device)
        base = sum(buffer.nbytes for buffer in module.buffers())
        manager.set_other(0, base)
        groups, state = _lay_out(module, settings, param_groups, manager, home, sharding)
        hidden = set_aside(state, nursery)
        hidden += sum(p.numel() * p.element_size() for _, p in state.unmanaged)
        if settings.device is None and hidden:
            base += hidden
            manager.set_other(0, base)
        built = dtypes_of(module)
        try:
            state.move_in(nursery)
        except BudgetError as error:
            raise refused_to_build(
                error, module, groups, settings, built=built, base=base
            ) from error
        if settings.ranks is not None:
            alike = dict([*module.named_buffers(), *state.unmanaged])
            for name in names_alone(module):
                alike.pop(name, None)
            take_first_ranks(alike, settings.ranks)
            if state.stored.anywhere:
                warn_of_copies(settings.ranks, state.beginnings)
        for parameter in module.parameters():
            if isinstance(parameter, PiecedParameter):
                rehome(parameter, home, settings.device or torch.device("cpu"))
    norms = reducer = None
    if sharding is not None:
        norms = ShardNorms(sharding.ranks, state.aligned)
        reducer = GradientReducer(state, sharding, norms)
    early = EarlyUpdates(state, enabled=settings.update_in_backward)
    stepping = Stepping(
        state,
        settings.precision,
        settings.clipping,
        early,
        exact=settings.exact,
        skip_overflow=settings.skip_overflow,
        shard_norms=norms,
    )
    gradients = Gradients(state, stepping.collected, reducer, stepping.backward_is_over, early)
    home.on_write = _mark_changed(state, gradients)
    device = settings.device or torch.device("cpu")
    overlap = Overlap(state, enabled=settings.overlap_update and settings.ranks is None)
    recording = None if record is None else record.recording
    segments = Segments(
        manager, device, base, overlap, early, allocated_peak(device), recording, state.sharding
    )
    engine = Engine(
        module,
        state,
        gradients,
        segments,
        settings.precision,
        settings.accumulation_steps,
        # With one tier there is nowhere else to be.
        RegionInputs(manager, home.host_tier)
        if settings.carry_inputs and len(manager.tiers) > 1
        else None,
    )
    optimizer = ChunkedOptimizer(
        groups,
        dict(settings.hyper),
        state,
        gradients,
        engine,
        stepping,
        segments,
        overlap,
        early,
    )
    engine.optimizer = optimizer
    if record is not None:
        record.begin(_facts_of(state, settings))
        record.follow(engine)
        if settings.ranks is not None:
            settings.ranks.comm.counters.observer = record.recording
        engine.record = record
    if settings.make_scheduler is not None:
        engine.schedule_with(settings.make_scheduler(optimizer))
    return engine, optimizer


def _built(
    provider: Callable[[], nn.Module] | nn.Module,
    nursery: Nursery,
    settings: RunSettings,
    param_groups: ParamGroups | None,
) -> nn.Module:
    """The model, built into `nursery`.

    Raises:
        BudgetError: that takes more than there is; what is named is enough for the whole state.
    """
    ready = provider if isinstance(provider, nn.Module) else None
    nursery.on_paper = ready is None and settings.ranks is None
    module = ready
    try:
        if ready is not None:
            refuse_late_marks(ready.named_parameters())
            bring_in(ready, nursery)
        module = build(provider, nursery)
        refuse_late_marks(module.named_parameters())
        if settings.ranks is not None:
            refuse_what_cannot_be_alone(module, settings.ranks)
        if nursery.refused is None:
            return module
        error = nursery.refused
    except Exception as raised:
        if nursery.refused is not None:  # it needs data to be built
            error = nursery.refused
        elif isinstance(raised, BudgetError):
            error = raised
        else:
            raise
    groups = [] if module is None else parameter_groups(module, settings, param_groups)
    raise refused_to_build(error, module, groups, settings) from error


@contextmanager
def _nursery(
    manager: ChunkManager,
    home: ChunkHome,
    settings: RunSettings,
    ahead: Ahead | None,
    sharding: Sharding | None,
) -> Iterator[Nursery]:
    """Where the model is built, or was built ahead.

    A run that computes on an accelerator builds in a manager of its own, which has half of the
    host budget until the weights have moved out.
    """
    if settings.device is None:
        if ahead is None:
            # A chunk is whole on a rank until it is full: as long as those of the run at most.
            longest = None if sharding is None else settings.chunk_limit or 1 << 20
            yield Nursery(manager, home, settings.piece_size, longest, sharding)
        else:
            yield ahead.nursery
        return
    begun = ahead
    if begun is None:
        ranks = None if settings.ranks is None else settings.ranks.in_cpu_memory()
        begun = building(replace(settings, ranks=ranks))
    with begun.connected(), closing(begun.manager):
        host = home.host_tier
        manager.set_other(host, begun.manager.ledger.tiers[0].capacity or 0)
        yield begun.nursery
        manager.set_other(host, 0)


def building(settings: RunSettings) -> Ahead:
    """Where a model is built: in CPU memory always, so that its random numbers are the CPU's.

    Args:
        settings: their `ranks`, if there are any, are connected for this alone.
    """
    if settings.device is None:
        manager = make_manager(settings, make_tiers(settings))
    else:
        budget = None if settings.host_budget is None else settings.host_budget // 2
        tiers: list[Tier] = [CpuTier("host", budget)]
        if settings.disk is not None:
            tiers.append(DiskTier("disk", Spool(*settings.disk, verify=settings.verify_disk)))
        manager = ChunkManager(tiers)
    home = ChunkHome(manager)
    sharding = None if settings.ranks is None else Sharding(manager, settings.ranks)
    longest = None if sharding is None else settings.chunk_limit or 1 << 20
    nursery = Nursery(manager, home, settings.piece_size, longest, sharding)
    return Ahead(settings, manager, home, nursery)


def _lay_out(
    module: nn.Module,
    settings: RunSettings,
    param_groups: ParamGroups | None,
    manager: ChunkManager,
    home: ChunkHome,
    sharding: Sharding | None,
) -> tuple[list[dict[str, Any]], ModelState]:
    groups = parameter_groups(module, settings, param_groups)
    if settings.ranks is not None:
        refuse_other_models(module, groups, settings.ranks)
    stored = stored_names(settings.ranks, names_alone(module))
    first = manager.tiers[0]
    specification = specification_of(settings, first.name, first.capacity)
    state = ModelState(
        module, groups, settings.rule, specification, manager, home, sharding, stored
    )
    base = sum(buffer.nbytes for buffer in module.buffers())
    refuse_what_cannot_fit(state, module, groups, settings, base)
    _refuse_unmanaged(state)
    _reserve_disk(state, settings)
    return groups, state


def _refuse_whole_tensor_rules(settings: RunSettings, ranks: Ranks) -> None:
    if ranks.shards_states and settings.rule.per_tensor:
        raise ConfigError(
            f"{settings.rule.name} updates a weight by norms or products of its whole tensor, and "
            "from ZeRO stage 1 on no rank has that: use zero_optimization.stage 0"
        )


def _refuse_what_is_split(module: nn.Module, home: ChunkHome, settings: RunSettings) -> None:
    if not home.has_split:
        return
    ranks = settings.ranks
    refuse_what_cannot_be_split(module, None if ranks is None else ranks.comm.topology.ranks)
    if settings.rule.per_tensor:
        raise ConfigError(
            f"{settings.rule.name} updates a weight by norms or products of its whole tensor, and "
            "this rank has parts of some (DTensors): use AdamW or another rule of elements"
        )


def _facts_of(state: ModelState, settings: RunSettings) -> dict[str, Any]:
    return {
        "parameters": sum(slot.numel for _, slot in state.slots.values()),
        "state_bytes": state.total_bytes(),
        "chunks": len(state.aligned),
        "chunk_elements": state.limit,
        "precision": str(settings.precision.dtype).removeprefix("torch."),
        "optimizer": type(settings.rule).__name__,
        "policy": type(settings.policy).__name__,
        "planned": settings.plan,
        "weights": [
            {
                "chunks": [chunk.id for chunk in aligned.chunks()],
                "names": [slot.name for slot in aligned.slots[:_MOST_NAMES]],
                "count": len(aligned.slots),
            }
            for aligned in state.aligned
        ],
    }


def parameter_groups(
    module: nn.Module, settings: RunSettings, param_groups: ParamGroups | None
) -> list[dict[str, Any]]:
    param_groups = param_groups or settings.groups_of
    if param_groups is None:
        given: Sequence[Mapping[str, Any]] = [
            {"params": [p for p in module.parameters() if p.requires_grad]}
        ]
    else:
        given = param_groups(module)
    groups = [{**settings.hyper, **group, "params": _whole(group["params"])} for group in given]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError(
            "the model has no parameter to train: every parameter has requires_grad=False, or "
            "param_groups returned none"
        )
    for group in groups:
        settings.rule.check(group)
    return groups


def _whole(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters as the optimizer sees them: those kept in pieces by their pieces."""
    return [
        part
        for parameter in parameters
        for part in (parameter.pieces if isinstance(parameter, PiecedParameter) else [parameter])
    ]


def _reserve_disk(state: ModelState, settings: RunSettings) -> None:
    """Take the disk space that the whole state may need now, so that it cannot run out later.

    A disk with less room does if memory can hold the rest. How much of it activations take shows
    when they come; until then nothing is known to be too small.
    """
    tiers = state.manager.tiers
    memory = [tier.capacity for tier in tiers if not isinstance(tier, DiskTier)]
    if settings.host_budget is None and settings.device_budget is None:
        return  # nothing will ever leave memory
    total = state.total_bytes()
    rest = 0 if None in memory else max(total - sum(budget or 0 for budget in memory), 0)
    for number, tier in enumerate(tiers):
        if isinstance(tier, DiskTier):
            reserved = tier.spool.preallocate(total, least=rest)
            if reserved < total:
                state.manager.limit(number, reserved)


def _refuse_unmanaged(state: ModelState) -> None:
    for name, parameter in state.unmanaged:
        if parameter.requires_grad:
            raise ConfigError(
                f"parameter {name!r} is a {type(parameter).__name__} of dtype {parameter.dtype}, "
                "which a chunk cannot hold, and it requires a gradient; freeze it, or make it an "
                "ordinary dense floating-point nn.Parameter"
            )


def _mark_changed(state: ModelState, gradients: Gradients) -> Callable[[int], None]:
    def mark(chunk: int) -> None:
        aligned = state.of_chunk(chunk)
        if aligned is not None:
            aligned.changed = True
        else:
            gradients.note_write(chunk)

    return mark
