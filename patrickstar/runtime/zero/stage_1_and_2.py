"""`deepspeed.runtime.zero.stage_1_and_2`: its memory estimators, from `engine.zero_estimates`."""

from patrickstar.engine.zero_estimates import (
    estimate_zero2 as estimate_zero2_model_states_mem_needs,
)
from patrickstar.engine.zero_estimates import (
    print_zero2_cold as estimate_zero2_model_states_mem_needs_all_cold,
)
from patrickstar.engine.zero_estimates import (
    print_zero2_live as estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
