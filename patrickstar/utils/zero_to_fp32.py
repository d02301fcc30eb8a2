"""`deepspeed.utils.zero_to_fp32`: names for `checkpoint.fp32_weights`."""

from patrickstar.checkpoint.fp32_weights import (
    fp32_weights as get_fp32_state_dict_from_zero_checkpoint,
)
from patrickstar.checkpoint.fp32_weights import (
    load_fp32_weights as load_state_dict_from_zero_checkpoint,
)

__all__ = ["get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"]
