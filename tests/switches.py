"""What PyTorch has switched on for the calling thread, which a test must leave as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def switches() -> dict[str, Any]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return {
        "hooks for saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "dispatch modes": _get_current_dispatch_mode_stack(),
        "gradients": torch.is_grad_enabled(),
        "threads of the backward": torch._C._is_multithreading_enabled(),
        "autocast": (depth, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "calls seen by subclasses": torch._C._is_torch_function_enabled(),
    }
