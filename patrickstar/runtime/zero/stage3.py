"""`deepspeed.runtime.zero.stage3`: its memory estimators, from `engine.zero_estimates`."""

from patrickstar.engine.zero_estimates import (
    estimate_zero3 as estimate_zero3_model_states_mem_needs,
)
from patrickstar.engine.zero_estimates import (
    print_zero3_cold as estimate_zero3_model_states_mem_needs_all_cold,
)
from patrickstar.engine.zero_estimates import (
    print_zero3_live as estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
