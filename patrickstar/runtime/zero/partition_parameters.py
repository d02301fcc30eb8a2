"""`deepspeed.runtime.zero.partition_parameters`: as `patrickstar.zero`, and parameter states.

A managed parameter has no `ds_id` and no `ds_status`: scripts that ask `hasattr(p, "ds_id")` before
they gather find that there is nothing to gather.
"""

import enum

from patrickstar.zero import (
    GatheredParameters,
    Init,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "register_external_parameter",
    "unregister_external_parameter",
]


class ZeroParamStatus(enum.Enum):
    """What `ds_status` says in DeepSpeed; here every parameter is available when it is used."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
