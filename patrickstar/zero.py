"""`deepspeed.zero`: DeepSpeed's public names for what is here already.

| name | what it is |
|---|---|
| `Init` | `engine.zero_init`: modules built straight into chunks |
| `GatheredParameters` | `engine.gathered`: parameters that stay in full for a while |
| `register_external_parameter` | accepted: a parameter may be used outside its module |
"""

from __future__ import annotations

from torch import nn

from patrickstar.engine.gathered import GatheredParameters
from patrickstar.engine.zero_init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted: every use of a parameter is seen, wherever it happens."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted, as `register_external_parameter`."""
