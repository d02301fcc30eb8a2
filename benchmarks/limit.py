"""The shortest step that the machine's rates allow, if everything overlapped perfectly.

For P parameters, T tokens a step, F the rate of matrix products, M of memory and R and W of the
disk, with a part h of the training state in memory:

    compute   6 P T / F      (8 with recomputation: one more forward)
    update    28 P / M       (bf16 gradient in, bf16 weight out, master and two moments in and out)
    disk      (1 - h) 12 P (1/R + 1/W)      for masters and moments, once in and once out
            + (1 - h)  2 P (2/R + 1/W)      for weights: read by forward and backward, written once

The ideal step is the longest of the three. The state is 14 bytes a parameter: weights, masters and
moments. h is taken from the memory that a run really used above its imports, all of it, so a run
that uses memory for anything else is measured against a harder limit.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_BYTES = 14  # of a parameter: bf16 weight, fp32 master, momentum and variance
_FP32_STATE = 12
_WEIGHT = 2
_UPDATE_TRAFFIC = 28


@dataclass(frozen=True)
class Rates:
    """Operations or bytes a second."""

    gemm: float
    copy: float
    read: float
    write: float


@dataclass(frozen=True)
class Ideal:
    """Seconds of a step, and of its parts."""

    compute: float
    update: float
    disk: float

    @property
    def step(self) -> float:
        return max(self.compute, self.update, self.disk)

    @property
    def bound(self) -> str:
        """The part that is the longest."""
        parts = {"compute": self.compute, "update": self.update, "disk": self.disk}
        return max(parts, key=lambda part: parts[part])


def in_memory(parameters: int, used: int) -> float:
    """The part of the state that `used` bytes hold, at most 1."""
    return min(1.0, used / (STATE_BYTES * parameters))


def ideal(parameters: int, tokens: int, h: float, rates: Rates, recompute: bool = False) -> Ideal:
    """The limit for a model of `parameters` weights and batches of `tokens` tokens."""
    away = (1 - h) * parameters
    return Ideal(
        compute=(8 if recompute else 6) * parameters * tokens / rates.gemm,
        update=_UPDATE_TRAFFIC * parameters / rates.copy,
        disk=away * _FP32_STATE * (1 / rates.read + 1 / rates.write)
        + away * _WEIGHT * (2 / rates.read + 1 / rates.write),
    )
