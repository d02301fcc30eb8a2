"""`deepspeed.utils`: DeepSpeed's public names, and nothing else. The code is elsewhere.

| names | where the code is |
|---|---|
| `safe_get_full_*`, `safe_set_full_*`, `safe_update_full_*` | `engine.full_precision` |
| `safe_get_local_*`, `safe_set_local_*` | `engine.local_share` |
| `set_z3_leaf_modules` and its kin | `engine.leaf_modules` |
| `RepeatingLoader` | `data.repeating` |
| `logger`, `log_dist` | `engine.logs` |
"""

from patrickstar.data.repeating import RepeatingLoader
from patrickstar.engine.full_precision import full_gradient as safe_get_full_grad
from patrickstar.engine.full_precision import full_state as safe_get_full_optimizer_state
from patrickstar.engine.full_precision import full_value as safe_get_full_fp32_param
from patrickstar.engine.full_precision import set_full_gradient as safe_set_full_grad
from patrickstar.engine.full_precision import set_full_state as safe_set_full_optimizer_state
from patrickstar.engine.full_precision import set_full_value as safe_set_full_fp32_param
from patrickstar.engine.full_precision import (
    update_full_gradients as safe_update_full_grad_vectorized,
)
from patrickstar.engine.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from patrickstar.engine.local_share import local_gradient as safe_get_local_grad
from patrickstar.engine.local_share import local_state as safe_get_local_optimizer_state
from patrickstar.engine.local_share import local_value as safe_get_local_fp32_param
from patrickstar.engine.local_share import set_local_gradient as safe_set_local_grad
from patrickstar.engine.local_share import set_local_state as safe_set_local_optimizer_state
from patrickstar.engine.local_share import set_local_value as safe_set_local_fp32_param
from patrickstar.engine.logs import log_dist, logger

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
