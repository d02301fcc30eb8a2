"""What PyTorch keeps switched on for a thread, put back when a pass ends early.

Hooks for saved tensors, dispatch modes, autocast and the like are switched on by a `with`. An
interrupt that falls on the end of a `with` loses that end: what switches off is code of Python,
which a signal can come before. What stays on then holds for whatever runs next in the process:
`torch.func` refuses to run under hooks, autocast changes numbers. So a pass of the engine notes
these switches before it begins, and puts them back around everything else if an exception comes.
One interrupt cannot hit both.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch


class ModesKept:
    """Around a pass: after an exception the switches of the thread are as they were before.

    Args:
        device: autocast is kept for its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self._hooks = _top_pack()
        self._dispatch = torch._C._len_torch_dispatch_stack()
        self._subclasses = torch._C._is_torch_function_enabled()
        self._gradients = torch.is_grad_enabled()
        self._threads = torch._C._is_multithreading_enabled()
        self._nesting = _autocast_nesting()
        self._autocast = _autocast(self._device)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._put_back()

    def _put_back(self) -> None:
        while (top := _top_pack()) is not None and top is not self._hooks:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        while torch._C._len_torch_dispatch_stack() > self._dispatch:
            _leave_dispatch_mode()
        if self._subclasses:  # the end of a guard that was not entered switches them on
            torch._C.DisableTorchFunctionSubclass().__exit__(None, None, None)
        torch._C._set_grad_enabled(self._gradients)
        torch._C._set_multithreading_enabled(self._threads)
        if _autocast(self._device) != self._autocast:
            enabled, dtype, cached = self._autocast
            torch.set_autocast_enabled(self._device, enabled)
            torch.set_autocast_dtype(self._device, dtype)
            torch.set_autocast_cache_enabled(cached)
        while _autocast_nesting() > self._nesting:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _top_pack() -> Any:
    """The function that packs saved tensors now, which tells one pair of hooks from another."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def _leave_dispatch_mode() -> None:
    mode = dispatch._get_current_dispatch_mode()
    try:
        mode.__exit__(None, None, None)  # type: ignore[union-attr]
    except IndexError:  # it had begun to leave, and has no flags any more that it could put back
        dispatch._pop_mode()


def _autocast(device: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )


def _autocast_nesting() -> int:
    """How many autocasts the thread is in, which PyTorch tells only while it counts."""
    deeper = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return deeper - 1
