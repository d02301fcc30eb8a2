"""`loss.backward()` instead of `engine.backward(loss)`.

A script may leave the backward to PyTorch, as with DeepSpeed. The engine learns of it where the
gradient enters the model, at the outputs of its forward: there it is divided by the number of
accumulation steps, as `engine.backward` divides the loss, and when the pass is over it counts as a
micro-batch. Where losses have to be scaled (fp16), a backward of a loss that was not scaled by
`engine.scale` is an error, since its update would be too small by the whole scale.

An output may lie upstream of another (hidden states beside logits), and what comes from there is
divided already. So outputs are given out as views, which nothing inside the model is made of.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class PlainBackward:
    """Watches the outputs of one engine's forwards.

    Args:
        counted: called when a backward that the engine did not run is over; kept weakly.

    Attributes:
        engine_runs: whether a backward that comes now is the engine's own.
        is_scaled: whether the next one is of a loss that was scaled.
    """

    def __init__(self, counted: Callable[[], None]) -> None:
        self._counted = weakref.WeakMethod(counted)
        self._pass = -1  # the one that was seen last, by autograd's number
        self.engine_runs = self.is_scaled = False

    def watch(self, outputs: Any, steps: int, *, scaled: bool) -> Any:
        """See gradients that come to `outputs`, tensors in any containers; returns them.

        Args:
            steps: of a gradient accumulation.
            scaled: whether losses have to be scaled.
        """
        hook = functools.partial(self._came, steps, scaled)
        if steps == 1:  # nothing is divided
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.register_hook(hook)  # type: ignore[no-untyped-call]
            return outputs

        def watched(output: torch.Tensor) -> torch.Tensor:
            if output.grad_fn is not None:
                output = output.view_as(output)
                output.register_hook(hook)  # type: ignore[no-untyped-call]
            return output

        return tree_map_only(torch.Tensor, watched, outputs)

    def _came(self, steps: int, scaled: bool, gradient: torch.Tensor) -> torch.Tensor | None:
        if self.engine_runs:
            return None
        if scaled and not self.is_scaled:
            raise RuntimeError(
                "this run scales its losses (fp16), and loss.backward() was called on one that is "
                "not scaled; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            torch.autograd.Variable._execution_engine.queue_callback(self._is_over)
        return None if steps == 1 else gradient / steps

    def _is_over(self) -> None:
        self.is_scaled = False
        counted = self._counted()
        if counted is not None:
            counted()
