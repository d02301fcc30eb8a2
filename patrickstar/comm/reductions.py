"""Scalars over ranks: gradient norms, overflow flags, losses.

Reduced in rank order in float64 on the CPU, on every rank from the same numbers, so all ranks get
the same bits and take the same branch (skip this step, clip by this factor).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patrickstar.comm.control import Control


class GlobalReductions:
    """Reductions over the ranks of a `Control`. Every method is called on all of them."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over ranks: `((x_0 + x_1) + x_2) + ...` in float64.

        For a global L2 norm pass the squares' sums and take the root.

        Raises:
            CommError: a rank did not take part, or passed another number of values.
        """
        total, *rest = self._gather("sum", values)
        for row in rest:
            total = total + row
        return [float(value) for value in total]

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over ranks; NaN when any rank has NaN.

        Raises:
            CommError: as `sum`.
        """
        return [float(value) for value in self._gather("max", values).amax(dim=0)]

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether each flag is set on at least one rank.

        Raises:
            CommError: as `sum`.
        """
        gathered = self._gather("any", [float(flag) for flag in flags])
        return [bool(value) for value in gathered.amax(dim=0)]

    def _gather(self, name: str, values: Sequence[float]) -> torch.Tensor:
        return self._control.exchange(
            f"{name} of scalars", torch.tensor(values, dtype=torch.float64)
        )
