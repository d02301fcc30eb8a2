"""Parameters too large to be resident at once.

A huge embedding or a very wide linear layer is kept as *pieces*: blocks of rows, each a managed
parameter with a place in a chunk of its own. The user's parameter stays where it is, with its name,
shape and identity, and holds no data; operators that name it are carried out piece by piece:

- `F.linear` concatenates the outputs of the pieces,
- `F.embedding` looks every row up in the host memory that its piece lives in, so that only the rows
  travel; a piece without a row is not touched,
- initialisation and other elementwise in-place operators go through the pieces in order and draw
  the same random numbers,
- any other operator that makes a new tensor gets the whole, put together for as long as it runs,
  if the budget has room for that. What would be a view of the whole is refused: there is no whole
  that writes through it could reach.

Whether a parameter is kept in pieces depends on its size alone (`patrickstar.piece_size`), never on
a budget: the sums over pieces round differently from one large product, and where data lives must
not change a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from patrickstar.engine.alone import is_alone, mark_alone
from patrickstar.engine.home import ChunkHome
from patrickstar.engine.parameter import METADATA
from patrickstar.engine.whole import PiecesError, put_together
from patrickstar.memory import Access, Use

_PLAIN = torch._C.DisableTorchFunctionSubclass
_ROWS = 16  # pieces of whole blocks of 16 rows draw the random numbers of the whole


class PiecedParameter(nn.Parameter):
    """A parameter whose rows live in several managed parameters."""

    pieces: list[nn.Parameter]
    starts: list[int]
    _home: ChunkHome

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with _PLAIN():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(func) or _HANDLERS.get(getattr(func, "__self__", None))
        if handler is not None:
            return handler(func, *args, **kwargs)
        if _is_elementwise(func) and args and type(args[0]) is cls:
            return _elementwise(func, *args, **kwargs)
        found = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls]
        return put_together(func, args, kwargs, found)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"PiecedParameter(shape={tuple(self.shape)}, pieces={len(self.pieces)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """While a model is built, other pieces in chunks; later, an ordinary parameter."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if self._home.laid_out:
            with torch.no_grad():
                whole = torch.cat([piece.detach() for piece in self.pieces])
            made = nn.Parameter(whole, self.requires_grad)
        else:
            with _PLAIN():
                placeholder = torch.empty((), dtype=self.dtype, device=self.device)
            made = nn.Parameter(placeholder.expand(self.shape), self.requires_grad)
            pieces = [copy.deepcopy(piece, memo) for piece in self.pieces]
            _become_pieced(made, pieces, list(self.starts), self._home)
        memo[id(self)] = made
        return made

    def rows(self) -> Iterator[tuple[int, int, nn.Parameter]]:
        """First row, end row and piece, in order."""
        for start, piece in zip(self.starts, self.pieces, strict=True):
            yield start, start + piece.shape[0], piece


def piece_name(whole: str, start: int, stop: int) -> str:
    """What the rows from `start` to `stop` of a parameter are called."""
    return f"{whole}[{start}:{stop}]"


def whole_name(name: str) -> str:
    """The name of the parameter that a piece is of; any other name as it is."""
    whole, bracket, rows = name.rpartition("[")
    return whole if bracket and rows.endswith("]") and ":" in rows else name


def rows_per_piece(shape: torch.Size, piece_size: int) -> int | None:
    """How many rows of a parameter of `shape` make a piece; None if it stays whole."""
    if len(shape) < 2 or shape.numel() <= piece_size or shape[0] < 2 * _ROWS:
        return None
    rows = piece_size // shape[1:].numel() // _ROWS * _ROWS
    return max(rows, _ROWS)


def split(
    parameter: nn.Parameter, rows: int, home: ChunkHome, adopt: Callable[[nn.Parameter], None]
) -> None:
    """Turn an ordinary parameter into a pieced one, in place; `adopt` gives each piece a chunk."""
    whole = parameter.detach()
    pieces, starts = [], list(range(0, whole.shape[0], rows))
    for start in starts:
        # `data` has a version counter of its own: an update of one piece is no change of another.
        rows_of = whole[start : start + rows].data
        piece = nn.Parameter(rows_of, requires_grad=parameter.requires_grad)
        if is_alone(parameter):
            mark_alone(piece)
        adopt(piece)
        pieces.append(piece)
    placeholder = torch.empty((), dtype=whole.dtype, device=whole.device)
    parameter.data = placeholder.expand(whole.shape)
    _become_pieced(parameter, pieces, starts, home)


def _is_elementwise(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    inplace = name.endswith("_") and not name.endswith("__")
    return inplace or name in ("__imul__", "__iadd__", "__isub__", "__itruediv__")


def _elementwise(func: Any, parameter: PiecedParameter, *args: Any, **kwargs: Any) -> Any:
    def part(value: Any, start: int, stop: int) -> Any:
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
            return value[start:stop]
        return value

    if getattr(func, "__name__", "") in ("requires_grad_",):
        with _PLAIN():
            func(parameter, *args, **kwargs)
    with torch.no_grad():
        for start, stop, piece in parameter.rows():
            rest = [part(value, start, stop) for value in args]
            named = {key: part(value, start, stop) for key, value in kwargs.items()}
            getattr(piece, func.__name__)(*rest, **named)
    return parameter


def linear_by_pieces(func: Any, input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """`F.linear` with a weight whose `rows()` are those of its pieces."""
    parts = []
    for start, stop, piece in weight.rows():
        parts.append(F.linear(input, piece, None if bias is None else bias[start:stop]))
    return torch.cat(parts, dim=-1)


class _Lookup(torch.autograd.Function):
    """Rows of one piece, read in host memory; the gradient is dense, as an embedding's is."""

    @staticmethod
    def forward(ctx: Any, piece: Any, index: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding = piece.shape[0], padding
        if not index.numel():
            return torch.empty(0, piece.shape[1], dtype=piece.dtype, device=index.device)
        home: ChunkHome = piece._home
        chunk, offset = home.place(piece)
        tier = home.host_tier
        with home.manager.use([Use(chunk, Access.READ, tier)]):
            flat = home.manager.tensor(home.manager.chunk(chunk), tier)
            table = flat[offset : offset + piece.numel()].view(piece.shape)
            return F.embedding(index.to(table.device), table).to(index.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (index,) = ctx.saved_tensors
        made = torch.ops.aten.embedding_dense_backward(grad, index, ctx.rows, ctx.padding, False)
        return made, None, None


def _embedding(
    func: Any,
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise PiecesError(
            "an embedding that is kept in pieces has no max_norm, scale_grad_by_freq or sparse "
            "gradient; raise patrickstar.piece_size to keep it whole"
        )
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
        raise IndexError("index out of range in self")
    index = input.reshape(-1)
    out = torch.zeros(index.numel(), weight.shape[1], dtype=weight.dtype)
    for start, stop, piece in weight.rows():
        here = ((index >= start) & (index < stop)).nonzero().squeeze(1)
        local = padding - start if start <= padding < stop else -1
        rows = _Lookup.apply(piece, index[here] - start, local)  # type: ignore[no-untyped-call]
        out = out.index_put((here,), rows)
    return out.view(*input.shape, weight.shape[1])


def _item(func: Any, parameter: PiecedParameter, index: Any, *value: Any) -> Any:
    """One row, to read or to set."""
    if not isinstance(index, int):
        raise PiecesError("a parameter in pieces is indexed by one row at a time")
    index %= parameter.shape[0]
    for start, stop, piece in parameter.rows():
        if start <= index < stop:
            if value:
                with torch.no_grad():
                    piece[index - start] = value[0]
                return None
            return piece[index - start] if parameter.requires_grad else piece.data[index - start]
    raise IndexError(index)


def _data(func: Any, parameter: PiecedParameter, *value: Any) -> Any:
    if func.__name__ == "__get__":
        return _detached(func, parameter)
    return _elementwise(torch.Tensor.copy_, parameter, *value)


def _detached(func: Any, parameter: PiecedParameter) -> PiecedParameter:
    """The same pieces under another name that autograd does not follow."""
    with _PLAIN():
        placeholder = torch.empty((), dtype=parameter.dtype, device=parameter.device)
    placeholder = placeholder.expand(parameter.shape)
    other = nn.Parameter(placeholder, requires_grad=False)
    _become_pieced(other, parameter.pieces, parameter.starts, parameter._home)
    return other  # type: ignore[return-value]


def _become_pieced(
    parameter: nn.Parameter, pieces: list[nn.Parameter], starts: list[int], home: ChunkHome
) -> None:
    parameter.__class__ = PiecedParameter
    assert isinstance(parameter, PiecedParameter)
    parameter.pieces, parameter.starts, parameter._home = pieces, starts, home


def rehome(parameter: PiecedParameter, home: ChunkHome, device: torch.device) -> None:
    """The pieces have their last place and dtype, in chunks of `home` for operators on `device`."""
    with _PLAIN():
        placeholder = torch.empty((), dtype=parameter.pieces[0].dtype, device=device)
        parameter.data = placeholder.expand(parameter.shape)
    parameter._home = home


def become_ordinary(parameter: PiecedParameter) -> None:
    """Join pieces that are ordinary parameters by now."""
    with torch.no_grad():
        whole = torch.cat([piece.detach() for piece in parameter.pieces])
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ("pieces", "starts", "_home"):
        del parameter.__dict__[name]
    parameter.data = whole


def _grad(func: Any, parameter: PiecedParameter, *value: Any) -> Any:
    """The gradient gathered from the pieces; it can be taken away but not set."""
    if func.__name__ == "__get__":
        parts = [piece.grad for piece in parameter.pieces]
        if any(part is None for part in parts):
            return None
        return torch.cat([part for part in parts if part is not None])
    if value and value[0] is not None:
        raise PiecesError("the gradient of a parameter in pieces cannot be set")
    for piece in parameter.pieces:
        piece.grad = None
    return None


def _requires_grad(func: Any, parameter: PiecedParameter, value: bool) -> None:
    with _PLAIN():
        func(parameter, value)
    for piece in parameter.pieces:
        piece.requires_grad = value


def _initialise(inner: Any) -> Any:
    def run(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(tensor, *args, **kwargs)

    return run


def _uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    return _elementwise(torch.Tensor.uniform_, tensor, a, b, generator=generator)


def _normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    return _elementwise(torch.Tensor.normal_, tensor, mean, std, generator=generator)


def _constant(tensor: Any, val: float) -> Any:
    return _elementwise(torch.Tensor.fill_, tensor, val)


def _kaiming_uniform(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> Any:
    fan = nn.init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]
    bound = 3.0**0.5 * (nn.init.calculate_gain(nonlinearity, a) / fan**0.5)  # type: ignore[arg-type]
    return _uniform(tensor, -bound, bound, generator)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.requires_grad: _requires_grad,
    F.linear: linear_by_pieces,
    F.embedding: _embedding,
    torch.Tensor.__getitem__: _item,
    torch.Tensor.__setitem__: _item,
    torch.Tensor.data: _data,
    torch.Tensor.grad: _grad,
    torch.Tensor.detach: _detached,
    nn.init.uniform_: _initialise(_uniform),
    nn.init.normal_: _initialise(_normal),
    nn.init.constant_: _initialise(_constant),
    nn.init.kaiming_uniform_: _initialise(_kaiming_uniform),
}
