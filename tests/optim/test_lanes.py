from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from patrickstar.optim.lanes import fused_lanes


def test_lanes_are_a_power_of_two_and_follow_the_width_of_the_dtype() -> None:
    lanes = fused_lanes(torch.float32)
    assert lanes in (4, 8, 16)
    assert fused_lanes(torch.bfloat16) == fused_lanes(torch.float16) == 2 * lanes
    assert fused_lanes(torch.float64) == lanes // 2


def test_the_last_lanes_minus_one_elements_are_where_the_paths_part() -> None:
    """A tensor one element short of a vector is updated by scalar code, a whole vector is not."""
    lanes = fused_lanes(torch.float32)

    def update(numel: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        parts = [torch.rand(500, lanes, generator=generator) for _ in range(4)]
        rows = [[row[:numel] for row in part] for part in parts]
        options: dict[str, Any] = {
            "lr": 0.01,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "eps": 1e-8,
        }
        steps = [torch.tensor(3.0)] * 500
        fused: Any = torch._fused_adamw_
        fused(*rows, [], steps, amsgrad=False, maximize=False, **options)
        return torch.stack(rows[3])

    whole, short = update(lanes)[:, : lanes - 1], update(lanes - 1)
    if torch.equal(whole, short):
        pytest.skip("both paths give the same bits on this build: there is no tail to see")
    singles = torch.cat([update(k)[:, k - 1 : k] for k in range(1, lanes)], dim=1)
    assert torch.equal(short, singles)


def test_asking_leaves_the_global_generator_alone() -> None:
    code = (
        "import torch; from patrickstar.optim.lanes import fused_lanes;"
        "torch.manual_seed(3); fused_lanes(); a = torch.rand(4);"
        "torch.manual_seed(3); assert torch.equal(a, torch.rand(4))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_hold_under_other_instruction_sets(capability: str) -> None:
    here = os.path.dirname(__file__)
    names = "test_fp32_runs or other_hyperparameters or without_a_master"
    environment = dict(os.environ, ATEN_CPU_CAPABILITY=capability, OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", names]
    done = subprocess.run(
        [*command, os.path.join(here, "test_adam.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
