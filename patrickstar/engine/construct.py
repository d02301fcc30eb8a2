"""Building a model straight into chunks.

While the user's code runs, every parameter is moved into a chunk the moment its module registers
it, so a model larger than memory can be built. The chunks keep the parameters' own dtype: the
code that initialises them, then or later (`self.apply(init)`, a scaled residual, weight tying),
draws the same random numbers and computes the same bits as in an ordinary construction. Rounding
to the training precision comes after.

With several ranks each builds the same, and keeps of what is built its part: no rank ever holds the
full model. Weights that differ (another seed) are those of the first rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from patrickstar.engine.alone import is_alone
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import ManagedParameter, ManagedView, manage, release
from patrickstar.engine.pieces import PiecedParameter, rows_per_piece, split
from patrickstar.engine.sharding import Sharding
from patrickstar.engine.split import is_split, part_of, refuse_fsdp, split_of
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.memory import Access, Chunk, ChunkManager, CpuTier, Use
from patrickstar.memory.layout import ALIGN

DEFAULT_PIECE_SIZE = 1 << 26  # elements; see engine.pieces
_SHORTEST, _LONGEST = 1 << 12, 1 << 22  # elements of a construction chunk


class Nursery:
    """The chunks that parameters live in until the model is complete and its layout is known.

    Args:
        longest: the most elements of a chunk, but for parameters that are longer.
        sharding: keeps the chunks in shards, if several ranks build the model.

    Attributes:
        on_paper: should a budget not do, build the rest of the model without data, to find out what
            it takes.
        refused: which budget did not, if that came about.
    """

    def __init__(
        self,
        manager: ChunkManager,
        home: ChunkHome,
        piece_size: int = DEFAULT_PIECE_SIZE,
        longest: int | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.manager, self.home, self._piece_size = manager, home, piece_size
        self.sharding = home.sharding = sharding
        self._full: list[Chunk] = []  # nothing is added to them any more
        memory = [tier for tier in manager.tiers if isinstance(tier, CpuTier)]
        self._length = construction_length([tier.capacity for tier in memory], longest)
        if sharding is not None:  # budgets may differ, chunks may not
            self._length = sharding.ranks.least(self._length)
        self._open: dict[tuple[torch.dtype, bool], tuple[Chunk, int]] = {}
        self._shared = 0  # construction chunks of all ranks so far
        self.chunks: list[Chunk] = []
        self.on_paper = False
        self.refused: BudgetError | None = None
        self._paper = ExitStack()
        self._parts: MutableMapping[Any, nn.Parameter] = WeakTensorKeyDictionary()
        home.move_to_new_data, home.adopt = self.readopt, self.adopt

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move an ordinary parameter into a chunk; others are left as they are."""
        if not is_ordinary(parameter):
            return
        if self.refused is None:
            try:
                self._adopt(parameter)
                return
            except BudgetError as error:
                if not self.on_paper:
                    raise
                self.refused = error
                self._paper.enter_context(torch.device("meta"))
        if type(parameter) is nn.Parameter:
            bare = torch.empty_like(parameter, device="meta", requires_grad=False)
            new = nn.Parameter(bare, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, new)  # type: ignore[no-untyped-call]

    def part(self, parameter: nn.Parameter) -> nn.Parameter:
        """The part that this rank has of `parameter`, a DTensor with data."""
        if parameter not in self._parts:  # a tied one has one part
            self._parts[parameter] = part_of(parameter)
            self.home.has_split = True
        return self._parts[parameter]

    def _adopt(self, parameter: nn.Parameter) -> None:
        rows = rows_per_piece(parameter.shape, self._piece_size)
        if split_of(parameter) is not None:
            rows = None  # operators are given its part as one tensor
        if rows is not None and parameter.is_contiguous():
            split(parameter, rows, self.home, self.adopt)
            return
        numel = parameter.numel()
        chunk, offset = self._place(parameter.dtype, numel, alone=is_alone(parameter))
        flat = self.manager.tensor(chunk)
        stride = parameter.stride() if is_dense(parameter) else None
        data = view_of(flat, offset, parameter.shape, stride)
        with self.manager.use([Use(chunk.id, Access.UPDATE)]):
            data.copy_(parameter.detach())
        manage(parameter, data, self.home)
        self.manager.keep_view(chunk, parameter)
        del flat, data
        self._spread_full()

    def leave_paper(self) -> None:
        """Building has ended, well or not."""
        self._paper.close()

    def complete(self) -> None:
        """The model is built."""
        self._full += [chunk for chunk, _ in self._open.values()]
        self._open.clear()
        self._spread_full()

    def give_up(self, chunk: Chunk) -> None:
        """Nobody lives in `chunk` any more."""
        self.chunks.remove(chunk)
        if not self.manager.is_referenced(chunk):
            if self.sharding is not None:
                self.sharding.forget(chunk)
            self.manager.delete(chunk)

    def _spread_full(self) -> None:
        full, self._full = self._full, []
        if self.sharding is not None:
            for chunk in full:
                if not self.sharding.is_alone(chunk):
                    self.sharding.spread(chunk)

    def readopt(self, parameter: nn.Parameter, data: torch.Tensor) -> None:
        """A managed parameter was given data of another shape or dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            release(parameter, data.detach().clone())
        self.adopt(parameter)

    def _place(self, dtype: torch.dtype, numel: int, *, alone: bool) -> tuple[Chunk, int]:
        padded = -(-numel // ALIGN) * ALIGN
        if padded > self._length:
            long = self._new(dtype, padded, alone=alone)
            self._full.append(long)
            return long, 0
        chunk, end = self._open.get((dtype, alone), (None, 0))
        if chunk is None or end + padded > self._length:
            if chunk is not None:
                self._full.append(chunk)
            chunk, end = self._new(dtype, self._length, alone=alone), 0
        self._open[dtype, alone] = (chunk, end + padded)
        return chunk, end

    def _new(self, dtype: torch.dtype, numel: int, *, alone: bool) -> Chunk:
        numel = max(numel, ALIGN)
        if self.sharding is not None:
            numel = self.sharding.ranks.padded(numel)
        chunk = self.manager.create(numel, dtype, "construction")
        self.chunks.append(chunk)
        if self.sharding is None:
            return chunk
        if alone:
            self.sharding.keep_alone(chunk)
        else:
            self._shared += 1
            name = f"construction chunk {self._shared}"
            self.sharding.shard(chunk, name, from_first=True)
        return chunk


def construction_length(budgets: Iterable[int | None], longest: int | None = None) -> int:
    """Elements of a construction chunk under these budgets: a thirty-second of the tightest, in
    fp32."""
    tightest = [budget // 128 for budget in budgets if budget is not None]
    return max(_SHORTEST, min([longest or _LONGEST, *tightest]))


def view_of(
    flat: torch.Tensor, offset: int, shape: torch.Size, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor of `shape` that starts `offset` elements into `flat`, with a version of its own.

    A plain slice would share one version counter among all parameters of a chunk, and a change to
    one would make autograd refuse the saved values of the others.
    """
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    fresh = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return fresh.set_(flat.untyped_storage(), offset, shape, stride)


def is_ordinary(parameter: nn.Parameter) -> bool:
    """Whether this is a parameter that a chunk can hold: real, dense and floating-point."""
    return may_be_managed(parameter) and not parameter.is_meta


def may_be_managed(parameter: nn.Parameter) -> bool:
    """Whether a chunk can hold this parameter, once it has data."""
    return (
        type(parameter) is nn.Parameter
        and type(parameter.data) is torch.Tensor
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
        and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the strides cover the elements without gaps or overlap, in whatever order."""
    expected = 1
    for size, stride in sorted(
        zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]
    ):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


@contextmanager
def into(nursery: Nursery) -> Iterator[None]:
    """Every parameter that a module registers meanwhile goes to `nursery`."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if parameter is not None:
            nursery.adopt(parameter)

    handle = register_module_parameter_registration_hook(hook)
    try:
        with _parameters_from_chunks():
            yield
    finally:
        handle.remove()


@contextmanager
def _parameters_from_chunks() -> Iterator[None]:
    """`nn.Parameter(p)` and `nn.Parameter(p.data)` work for a `p` that lies in a chunk already.

    Reparametrizations (weight norm, say) make their parameters so. `nn.Parameter` takes tensors of
    classes other than torch's own for exotic ones and refuses them or keeps their class; here the
    new parameter starts with a copy of the contents, and gets a place of its own when it is
    registered.
    """
    plain: Any = nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (ManagedParameter, ManagedView):
            with torch.no_grad():
                data = data.clone()
        return plain(cls, data, requires_grad)

    nn.Parameter.__new__ = new  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Parameter.__new__ = plain  # type: ignore[method-assign]


def take_parts(module: nn.Module, nursery: Nursery) -> None:
    """Give the modules of a model this rank's parts for what is split.

    Not before the model is ready: what splits it takes a parameter that is no DTensor for one that
    it has not split yet.
    """
    found = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and is_split(parameter)
    ]
    if found:
        refuse_fsdp(module)
    for owner, name, parameter in found:
        if not parameter.is_meta:  # which is refused by name
            owner._parameters[name] = nursery.part(parameter)


def build(provider: Callable[[], nn.Module] | nn.Module, nursery: Nursery) -> nn.Module:
    """Call `provider` with its parameters going to `nursery`; a ready module is moved there.

    Raises:
        ConfigError: what came is no module, or a parameter has no data.
    """
    try:
        return _build(provider, nursery)
    finally:
        nursery.leave_paper()


def _build(provider: Callable[[], nn.Module] | nn.Module, nursery: Nursery) -> nn.Module:
    if isinstance(provider, nn.Module):
        module = provider
    elif not callable(provider):
        raise ConfigError(
            f"model_provider is {provider!r}; pass a callable that builds and returns the model, "
            "or the model itself"
        )
    else:
        with into(nursery):
            module = provider()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model_provider returned {type(module).__name__}, not an nn.Module; "
                "pass a callable that builds and returns the model, or the model itself"
            )
    take_parts(module, nursery)
    for name, parameter in module.named_parameters():
        if parameter.is_meta and nursery.refused is None:
            raise ConfigError(
                f"parameter {name!r} is on the meta device and has no data; "
                "load weights into it inside model_provider, or build it on the CPU"
            )
        if type(parameter) not in (ManagedParameter, PiecedParameter):
            nursery.adopt(parameter)
    nursery.complete()
    return module
