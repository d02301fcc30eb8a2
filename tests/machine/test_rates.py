"""Rates, measured on little."""

from __future__ import annotations

import torch

from patrickstar.machine.rates import copy_rate, gemm_rate, update_rate


def test_rates_are_those_of_the_fastest_try() -> None:
    assert gemm_rate(torch.float32, 2, ((64, 64, 64),)) > 1e6
    assert copy_rate(1 << 16, 2) > 1e6
    assert update_rate(1 << 12, 2) > 1e6
