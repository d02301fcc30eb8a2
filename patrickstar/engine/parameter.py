"""Parameters whose data may be elsewhere.

`nn.Parameter` switches `__torch_function__` off; `ManagedParameter` switches it on again. So every
use of a parameter from Python, in its owner's forward or anywhere else (a tied head, a functional
call, an adapter, a print), passes here, and its chunk is made resident for as long as the operator
runs. Nothing has to be registered by hand, and a parameter that is not used is not fetched. What
autograd saves for the backward passes through `saved_tensors` instead.

A view of a managed parameter is a `ManagedView`, so that writing through it (`p.data.mul_()`,
`p[0] = 1`) is noticed too. A view that is alive keeps its chunk resident (see `memory.manager`).

The class of an existing parameter is changed in place: its identity, name, hooks and attributes
stay the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from patrickstar.engine.split import as_wholes, has_plain_tensors, is_split

_PLAIN = torch._C.DisableTorchFunctionSubclass


class Home(Protocol):
    """What a managed tensor asks of the place that its data lives in."""

    has_split: bool

    def use(self, tensors: list[Any], *, writes: list[Any]) -> Any:
        """A context in which the chunks of `tensors` are resident; those of `writes` change."""
        ...

    def owns(self, storage: int) -> bool:
        """Whether the storage with this C++ address belongs to a chunk."""
        ...

    def adopt_copy(self, parameter: Any) -> None:
        """`parameter` is an ordinary copy of one that lives here."""
        ...

    def get_grad(self, parameter: Any) -> torch.Tensor | None: ...

    def set_grad(self, parameter: Any, grad: torch.Tensor | None) -> None: ...

    def set_data(self, parameter: Any, data: torch.Tensor) -> None: ...


def _metadata() -> frozenset[Any]:
    """What can be asked of a tensor without its data."""
    tensor = torch.Tensor
    getters = (
        "shape dtype device layout requires_grad is_leaf grad_fn _version ndim is_cuda is_cpu "
        "is_meta is_sparse is_quantized is_mkldnn is_xpu is_mps is_sparse_csr is_nested output_nr "
        "retains_grad names itemsize nbytes _backward_hooks _post_accumulate_grad_hooks _base "
        "is_vulkan is_ipu is_ort is_xla is_mtia is_maia"
    ).split()
    methods = (
        "size stride numel nelement dim ndimension storage_offset is_contiguous is_floating_point "
        "is_complex is_signed is_inference element_size get_device untyped_storage register_hook "
        "register_post_accumulate_grad_hook has_names _is_view is_same_size is_shared is_coalesced "
        "is_pinned retain_grad __hash__ __len__ _has_symbolic_sizes_strides new_tensor new_empty "
        "new_zeros new_ones new_full"
    ).split()
    found = {getattr(tensor, name).__get__ for name in getters if hasattr(tensor, name)}
    found |= {getattr(tensor, name) for name in methods if hasattr(tensor, name)}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
    found |= {torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like}
    return frozenset(found)


METADATA = _metadata()
_GRAD = torch.Tensor.grad
_DATA = torch.Tensor.data
LEAKS = {"data_ptr", "numpy", "__array__", "__dlpack__", "storage", "data_ptr_as_int"}


def _managed_among(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) in (ManagedParameter, ManagedView):
            yield value
        elif isinstance(value, list | tuple):
            yield from _managed_among(value)
        elif isinstance(value, dict):
            yield from _managed_among(value.values())


def _is_write(func: Callable[..., Any]) -> bool:
    """Whether `func` changes its first argument, by the naming rule of torch."""
    name: str = getattr(func, "__name__", "")
    if name in ("__set__", "__setitem__") or name in LEAKS:
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.endswith("__")


def _dispatch(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    kwargs = kwargs or {}
    if torch.compiler.is_compiling() or func in METADATA:
        with _PLAIN():
            return func(*args, **kwargs)
    if type(args[0] if args else None) is ManagedParameter:
        of = getattr(func, "__self__", None)
        if of is _GRAD:
            return _grad_property(func, args)
        if of is _DATA and func.__name__ == "__set__":
            return args[0]._home.set_data(args[0], args[1])
    managed = list(_managed_among(args)) + list(_managed_among(kwargs.values()))
    writes: list[Any] = []
    if _is_write(func):
        writes += list(_managed_among(args[:1] if args else kwargs.values()))
    if kwargs.get("out") is not None:
        writes += list(_managed_among([kwargs["out"]]))
    if not managed:
        with _PLAIN():
            return func(*args, **kwargs)
    home: Home = managed[0]._home
    with home.use(managed, writes=writes), _PLAIN():
        before = [tensor._version for tensor in managed]
        if home.has_split:
            args, kwargs = _as_operators_see(func, args, kwargs)
        result = func(*args, **kwargs)
        # Not every write has a name that says so: an embedding with `max_norm` scales its rows.
        changed = [t for t, old in zip(managed, before, strict=True) if t._version != old]
        unsaid = [t for t in changed if not any(t is written for written in writes)]
        if unsaid:
            with home.use(unsaid, writes=unsaid):
                pass
        return _marked(result, home)


def _as_operators_see(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with DTensors for parameters of which this rank has a part."""
    if getattr(func, "__self__", None) is _DATA or func is torch.Tensor.detach:
        return args, kwargs
    if _is_write(func) and has_plain_tensors(args[1:]):
        return args, kwargs  # the part takes over what is a part
    return as_wholes(args), as_wholes(kwargs)


def _grad_property(func: Any, args: tuple[Any, ...]) -> Any:
    parameter = args[0]
    name = func.__name__
    if name == "__get__":
        return parameter._home.get_grad(parameter)
    parameter._home.set_grad(parameter, args[1] if name == "__set__" else None)
    return None


def _marked(result: Any, home: Home) -> Any:
    """Results that are views of a chunk become managed views."""
    if isinstance(result, torch.Tensor):
        inside = result
        while torch._C._functorch.is_functorch_wrapped_tensor(inside):  # torch.vmap, torch.func
            inside = torch._C._functorch.get_unwrapped(inside)
        plain = type(inside) is torch.Tensor and inside.layout is torch.strided
        if plain and home.owns(inside.untyped_storage()._cdata):
            if inside is not result:
                # A view inside a transform could not be fetched again when it is used.
                return result.clone()
            return as_view(result, home)
        if is_split(inside) and home.owns(inside._local_tensor.untyped_storage()._cdata):  # type: ignore[attr-defined]
            return result.clone()
        return result
    if type(result) in (list, tuple):
        return type(result)(_marked(item, home) for item in result)
    return result


class ManagedParameter(nn.Parameter):
    """An `nn.Parameter` that lives in a chunk."""

    _home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, types, args, kwargs)

    def set_(self, source: Any = None, *where: Any) -> Any:
        """Take over the contents of the tensor `source`, as `parameter.data = source` does.

        `torch.Tensor.set_` is not seen by `__torch_function__`; taking over the other's storage
        would leave the chunk behind, and the parameter would never be updated again.

        Raises:
            ValueError: `source` is no tensor, or a part of a storage is asked for.
        """
        if where or not isinstance(source, torch.Tensor):
            raise ValueError(
                "set_ on a managed parameter takes one tensor, whose contents are copied; "
                "it cannot point into another storage, because its data lives in a chunk"
            )
        self._home.set_data(self, source)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a parameter of its own: in a chunk while a model is built, outside later."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        with self._home.use([self], writes=[]), _PLAIN():
            copy = nn.Parameter(self.detach().clone(), self.requires_grad)
            if "_split" in self.__dict__:
                copy.__dict__["_split"] = self.__dict__["_split"]
        self._home.adopt_copy(copy)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ManagedView(torch.Tensor):
    """A view of data that lives in a chunk."""

    _home: Home

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with self._home.use([self], writes=[]), _PLAIN():
            return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def manage(parameter: nn.Parameter, data: torch.Tensor, home: Home) -> None:
    """Make `parameter` live in `data`, a view of a chunk. Its identity stays.

    The caller has copied the contents; the parameter's shape must be that of `data`.
    """
    with _PLAIN():
        parameter.data = data
    parameter.__class__ = ManagedParameter
    parameter._home = home  # type: ignore[attr-defined]


def release(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Make `parameter` an ordinary parameter again, with `data` as its data."""
    with _PLAIN():
        parameter.data = data
    parameter.__class__ = nn.Parameter
    parameter.__dict__.pop("_home", None)


def as_view(tensor: torch.Tensor, home: Home) -> torch.Tensor:
    """Mark `tensor`, which lies in a chunk, so that its uses are noticed."""
    tensor.__class__ = ManagedView
    tensor._home = home  # type: ignore[attr-defined]
    return tensor
