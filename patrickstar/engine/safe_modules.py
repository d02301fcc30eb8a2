"""Which gradients may travel between ranks in the precision of autocast.

Under `torch_autocast` weights and their gradients are fp32. A linear layer computes in 16 bits
there, so 16 bits are all that its gradient knows, and it is sent as such: half the bytes. DeepSpeed
calls modules of this kind safe in lower precision, and so do we: `torch.nn.Linear` and the
convolutions, unless `torch_autocast.lower_precision_safe_modules` names others.

Which weights these are decides about chunks, since a chunk travels as one. Weights themselves are
gathered as they are: autocast rounds them where it uses them, to the same numbers, while a
checkpoint that gathers them needs every bit.
"""

from __future__ import annotations

import importlib

from torch import nn

from patrickstar.config import Config
from patrickstar.engine.pieces import PiecedParameter
from patrickstar.errors import ConfigError

_SAFE: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def safe_classes(config: Config) -> tuple[type[nn.Module], ...]:
    """The classes of modules whose gradients may travel in lower precision; none without autocast.

    Raises:
        ConfigError: a name is no class of modules.
    """
    wanted = config.torch_autocast
    if not wanted.enabled:
        return ()
    names = wanted.lower_precision_safe_modules
    return _SAFE if names is None else tuple(_class_named(name) for name in names)


def low_parameters(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> set[int]:
    """The ids of parameters that belong to a module of exactly one of `classes`."""
    found: set[int] = set()
    for part in module.modules():
        if type(part) in classes:
            for parameter in part.parameters(recurse=False):
                pieces = parameter.pieces if isinstance(parameter, PiecedParameter) else [parameter]
                found.update(id(piece) for piece in pieces)
    return found


def _class_named(name: str) -> type[nn.Module]:
    package, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules: {name!r} cannot be imported ({error}); "
            "name classes of modules with their package, such as 'torch.nn.Linear'"
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules: {name!r} is {found!r}, which is no "
            "class of modules; name classes such as 'torch.nn.Linear'"
        )
    return found
