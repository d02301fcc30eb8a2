"""DeepSpeed's leaf modules, which nothing here needs.

Its ZeRO-3 fetches parameters module by module, and a module whose parts run in a changing order,
such as a mixture of experts, has to be declared as one. Here parameters come when they are used, in
whatever order, so the declarations are accepted and remembered by the modules, without effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_MARK = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]
) -> list[nn.Module]:
    """Mark the modules of these classes (or class names), and return them."""
    classes = list(leaf_module_classes)
    found = [module for module in model.modules() if _is_one_of(module, classes)]
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str]
) -> list[nn.Module]:
    """Take the marks away, and return the modules that had one."""
    classes = list(leaf_module_classes)
    found = [m for m in model.modules() if _is_one_of(m, classes) and z3_leaf_module(m)]
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    setattr(module, _MARK, flag)


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether `module` is marked."""
    return bool(getattr(module, _MARK, False))


def _is_one_of(module: nn.Module, classes: list[type[nn.Module] | str]) -> bool:
    names = {type(module).__name__, f"{type(module).__module__}.{type(module).__qualname__}"}
    return any(one in names if isinstance(one, str) else isinstance(module, one) for one in classes)
