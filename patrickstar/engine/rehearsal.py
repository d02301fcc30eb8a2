"""An iteration played through without computing.

The module runs on fake tensors (shapes and dtypes without data): its forward, and a backward from
the sum of its outputs. The same watching that a first live iteration has writes the same trace, so
a plan can be made from it before anything is allocated. The updates follow from the layout of the
chunks; see `grouping`. A model whose path depends on the data cannot be rehearsed.

Which pieces of an embedding have a row that is looked up depends on the data, too. All of them are
taken to have every row, so what is found for one that is kept in pieces is at least what it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves, tree_map_only

from patrickstar.engine.parameter import METADATA
from patrickstar.engine.pieces import PiecedParameter, linear_by_pieces
from patrickstar.engine.whole import Whole, exchanged
from patrickstar.memory.live import LiveStorages, WatchOperators, bytes_made
from patrickstar.memory.trace import Access, Recorder, Trace, Use
from patrickstar.optim import Widened

_PLAIN = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True)
class RehearsedChunks:
    """Where a parameter lives: its chunk, and the chunk of its gradient if it is trained."""

    parameter: int
    gradient: int | None


class OperatorSink(Protocol):
    """Is told of every operator of a rehearsal, and at which moment of the trace it comes."""

    def ran(
        self, moment: int, func: Any, args: Any, kwargs: Any, result: Any, managed: Container[int]
    ) -> None:
        """An operator ran; `managed` are the addresses of storages that lie in chunks."""
        ...

    def stored(self, moment: int, gradient: torch.Tensor) -> None:
        """A gradient went to its chunk."""
        ...


@dataclass(frozen=True)
class _SavedView:
    """A saved tensor that lies in a chunk, without a reference to its storage."""

    of: torch.Tensor  # the parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Resident:
    """The storage of one parameter, and how many refer to it without wanting its contents."""

    def __init__(self, fake: torch.Tensor, chunk: int) -> None:
        self.chunk = chunk
        self._storage = fake.untyped_storage()
        self._references = self._count()

    def is_referenced(self) -> bool:
        """Whether something else refers to it, so that its chunk could not leave."""
        return self._count() > self._references

    def _count(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))


class _Stage:
    """Notes uses and memory while the rehearsal runs."""

    def __init__(self, base: int, grad_dtype: torch.dtype, sink: OperatorSink | None) -> None:
        self.recorder = Recorder()
        self._base, self._grad_dtype, self._sink = base, grad_dtype, sink
        self._norms: list[torch.Tensor] = []
        self._widened = Widened()
        self._residents: list[_Resident] = []
        self._parameters: dict[int, torch.Tensor] = {}
        self._current: tuple[Use, ...] = ()
        self._chunk_of: dict[int, int] = {}
        self._filled: set[int] = set()
        self.live = LiveStorages(self._chunk_of.__contains__, "cpu")
        self._watched: dict[type, type] = {}

    @property
    def _moment(self) -> int:
        return max(len(self.recorder.trace.moments) - 1, 0)

    def use(self, *uses: Use) -> None:
        if uses != self._current:
            self._current = uses
            self.recorder.moment(uses, self._held({use.chunk for use in uses}))
            self.after()

    def _held(self, used: set[int]) -> dict[int, tuple[int, ...]]:
        held = dict.fromkeys(
            resident.chunk
            for resident in self._residents
            if resident.chunk not in used and resident.is_referenced()
        )
        return {0: tuple(held)} if held else {}

    def segment(self, name: str) -> None:
        self.after()
        self.recorder.segment(name)

    def before(self, nbytes: int) -> None:
        self.recorder.other(0, self._base + self.live.nbytes + nbytes)

    def after(self) -> None:
        self.recorder.other(0, self._base + self.live.nbytes)

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._sink is not None:
            self._sink.ran(self._moment, func, args, kwargs, result, self._chunk_of)

    def adopt(self, fake: torch.Tensor, chunk: int) -> None:
        """This tensor, and every view of it, lies in `chunk`: its uses are noted from now on."""
        key = fake.untyped_storage()._cdata
        self._chunk_of[key], self._parameters[key] = chunk, fake
        self._watch(fake)
        self._residents.append(_Resident(fake, chunk))

    def pack(self, tensor: torch.Tensor) -> Any:
        with _PLAIN():
            of = self._parameters.get(tensor.untyped_storage()._cdata)
            if of is None or of.dtype != tensor.dtype:
                return tensor
            offset = int(tensor.storage_offset())
            return _SavedView(of, tensor.shape, tensor.stride(), offset)

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _SavedView):
            return packed  # type: ignore[no-any-return]
        with _PLAIN(), torch.no_grad():
            self.use(Use(self._chunk_of[packed.of.untyped_storage()._cdata], Access.READ))
            return packed.of.detach().as_strided(packed.shape, packed.stride, packed.offset)

    def collect(self, gradient: int, made: torch.Tensor | None) -> None:
        access = Access.UPDATE if gradient in self._filled else Access.OVERWRITE
        self._filled.add(gradient)
        self.use(Use(gradient, access))
        if made is None:
            return
        if self._sink is not None:
            self._sink.stored(self._moment, made)
        # The norm is taken in fp32 (`Stepping.collected`), which may take more room than the rest.
        wide = made if self._grad_dtype is torch.float32 else self._widened.of(made)
        self._norms.append(torch.linalg.vector_norm(wide))

    def backward_is_over(self) -> None:
        self._widened.release()

    def _watch(self, fake: Any) -> None:
        # A fake tensor has a class of its own; one that also notes its uses is made beside it.
        kind = type(fake)
        if kind not in self._watched:
            noting = classmethod(lambda cls, *call: self._noting(*call))
            self._watched[kind] = type("Rehearsed", (kind,), {"__torch_function__": noting})
        fake.__class__ = self._watched[kind]

    def _noting(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _PLAIN():
                return func(*args, **kwargs)
        with _PLAIN():
            chunks = dict.fromkeys(self._chunks((args, kwargs)))
        if chunks:
            self.use(*(Use(chunk, Access.READ) for chunk in chunks))
        with _PLAIN():
            result = func(*args, **kwargs)
            for leaf in tree_leaves(result):
                view = isinstance(leaf, FakeTensor) and type(leaf) not in self._watched.values()
                if view and leaf.untyped_storage()._cdata in self._chunk_of:
                    self._watch(leaf)
        return result

    def in_pieces(self, whole: Any, pieces: list[Any], lookups: int) -> None:
        """`whole` is kept in `pieces`, which are adopted; operators on it go to them."""
        kind = type(whole)
        calls = classmethod(lambda cls, *call: self._by_pieces(lookups, *call))
        whole.__class__ = type("RehearsedPieces", (kind,), {"__torch_function__": calls})
        starts = itertools.accumulate((piece.shape[0] for piece in pieces), initial=0)
        rows = [(start, start + p.shape[0], p) for start, p in zip(starts, pieces, strict=False)]
        whole.rows = lambda: rows

    def _by_pieces(
        self, lookups: int, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _PLAIN():
                return func(*args, **kwargs)
        if func is F.linear:
            return linear_by_pieces(func, *args, **kwargs)
        if func is F.embedding:
            return self._looked_up(lookups, *args, **kwargs)
        # Any other operator gets the whole, put together for as long as it runs.
        wholes = {
            id(leaf): Whole.apply(*(piece for _, _, piece in leaf.rows()))  # type: ignore[no-untyped-call]
            for leaf in tree_leaves((args, kwargs))
            if hasattr(leaf, "rows")
        }
        return func(*exchanged(args, wholes), **exchanged(kwargs, wholes))

    def _looked_up(self, lookups: int, input: Any, weight: Any, *_: Any, **__: Any) -> Any:
        index = input.reshape(-1)
        out = None
        for _, _, piece in weight.rows():
            with _PLAIN():
                self.use(Use(self._chunk_of[piece.untyped_storage()._cdata], Access.READ, lookups))
                rows = _AllRows.apply(piece, index)  # type: ignore[no-untyped-call]
                if out is None:
                    out = torch.zeros_like(rows)
                out = out.index_put((index,), rows)
        assert out is not None
        return out.view(*input.shape, weight.shape[1])

    def _chunks(self, tree: Any) -> Iterator[int]:
        for leaf in tree_leaves(tree):
            if type(leaf) in self._watched.values():
                yield self._chunk_of[leaf.untyped_storage()._cdata]


class _AllRows(torch.autograd.Function):
    """As if every row were looked up in this piece."""

    @staticmethod
    def forward(ctx: Any, piece: Any, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows = piece.shape[0]
        made: torch.Tensor = piece.new_empty(index.shape[0], piece.shape[1])
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grad, index, ctx.rows, -1, False), None


class _WatchRehearsal(WatchOperators):  # type: ignore[no-untyped-call]
    """Tells the stage what ran, too."""

    def __init__(self, stage: _Stage) -> None:
        super().__init__(stage.live, stage.before, stage.after)
        self._stage = stage
        self._made: dict[Any, int] = {}  # layers repeat

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not func.is_view and func.namespace != "prim":
            self._stage.operator(func, args, kwargs or {}, result)
        return result

    def made(self, func: Any, args: Any, kwargs: Any) -> int:
        key = (func, *kwargs, *map(_described, tree_leaves((args, kwargs))))
        try:
            if key not in self._made:
                self._made[key] = bytes_made(func, args, kwargs)
            return self._made[key]
        except TypeError:  # an argument that cannot be a key
            return bytes_made(func, args, kwargs)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.size(), leaf.stride(), leaf.dtype, leaf.layout
    return type(leaf), leaf  # 1 and True are equal


def rehearse(
    module: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    chunks: Mapping[str, Sequence[RehearsedChunks]],
    *,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None = None,
    base: int = 0,
    sink: OperatorSink | None = None,
    lookups: int = 0,
) -> Trace:
    """The trace of one iteration of `module` on inputs of these shapes.

    Its last moment is the step, which uses nothing here.

    Args:
        module: on any device, the meta device included; it is not changed.
        inputs: positional and keyword arguments; tensors of the right shapes on any device.
        chunks: for each parameter name, where it lives, or its pieces.
        dtype: of the parameters and floating-point buffers during training.
        grad_dtype: of the gradients in their chunks; `dtype` if not given.
        base: bytes that are always there and no chunk owns.
        sink: is told of every operator.
        lookups: the tier that rows of an embedding in pieces are looked up on.

    Raises:
        Exception: whatever a data-dependent model raises on fake tensors.
    """
    stage = _Stage(base, grad_dtype or dtype, sink)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        state: dict[str, Any] = {}
        parameters: list[Any] = []
        made: dict[int, Any] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = _fake(parameter, chunks.get(name, ()), dtype, stage, lookups)
                parameters.append(made[id(parameter)])
            state[name] = made[id(parameter)]
        for name, buffer in module.named_buffers(remove_duplicate=False):
            state[name] = _fake_like(buffer, dtype)
        args, kwargs = tree_map_only(
            torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else _fake_like(t, dtype), inputs
        )
        watch = _WatchRehearsal(stage)
        stage.recorder.segment("forward")
        # Swapped for the backward too, which may compute parts of the forward again.
        with _reparametrize_module(module, state), watch, torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(stage.pack, stage.unpack):
                loss = _some_loss(module(*args, **kwargs))
                stage.segment("backward")
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
        del loss, state, made, fake_mode
        stage.backward_is_over()
        stage.segment("step")
        stage.recorder.moment(())
        stage.after()
    return stage.recorder.trace


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kept = dtype if tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=kept, device="cpu")


def _fake(
    parameter: nn.Parameter,
    chunks: Sequence[RehearsedChunks],
    dtype: torch.dtype,
    stage: _Stage,
    lookups: int,
) -> Any:
    if not isinstance(parameter, PiecedParameter):
        return _fake_parameter(parameter, chunks[0] if chunks else None, dtype, stage)
    pairs = zip(parameter.pieces, chunks, strict=True)
    pieces = [_fake_parameter(piece, where, dtype, stage) for piece, where in pairs]
    with _PLAIN():
        bare = torch.empty((), dtype=dtype, device="cpu").expand(parameter.shape)
        whole = nn.Parameter(bare, parameter.requires_grad)
    stage.in_pieces(whole, pieces, lookups)
    return whole


def _fake_parameter(
    parameter: nn.Parameter, chunks: RehearsedChunks | None, dtype: torch.dtype, stage: _Stage
) -> Any:
    with _PLAIN():
        fake = nn.Parameter(
            torch.empty(parameter.shape, dtype=dtype, device="cpu"), parameter.requires_grad
        )
    if chunks is None:
        return fake
    stage.adopt(fake, chunks.parameter)
    gradient = chunks.gradient
    if gradient is not None and parameter.requires_grad:

        def collect(leaf: Any) -> None:
            with _PLAIN(), torch.no_grad():
                made, leaf.grad = leaf.grad, None
                stage.collect(gradient, made)

        fake.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return fake


def _some_loss(output: Any) -> torch.Tensor | None:
    """The loss in the output, or the sum of what could become one."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return None
    first = leaves[0]
    return first if first.numel() == 1 else sum((t.sum() for t in leaves[1:]), first.sum())
