"""The page and the example do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import torch

from patrickstar.comm import Communicator
from tests.rank_pool import ROOT

PAGE = ROOT / "docs" / "comm.md"
EXAMPLE = ROOT / "examples" / "comm_without_modules.py"


def run_the_page(rank: int, size: int, source: str) -> set[str]:
    names: dict[str, object] = {}
    exec(compile(source, "docs/comm.md", "exec"), names)
    return set(names)


def test_the_code_on_the_page_runs_on_one_two_and_three_ranks(ranks):
    blocks = re.findall(r"(<!-- not run -->\n)?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = "\n".join(code for skipped, code in blocks if not skipped)
    assert source.count("Communicator.open") == 1
    for size in (1, 2, 3):
        for names in ranks.run(run_the_page, size, source):
            assert {"comm", "whole", "report", "norm_squared", "totals"} <= names


def losses_of_the_example(rank: int, size: int, owners: bool) -> tuple[list[float], int]:
    example = runpy.run_path(str(EXAMPLE))
    draw = torch.Generator().manual_seed(rank)
    with Communicator.open(timeout=30) as comm:
        network = example["Network"](comm, owners=owners)
        found = []
        for _ in range(5):
            inputs = torch.randn(8, example["FEATURES"], generator=draw)
            found.append(network.step(inputs, inputs.sum(dim=1).tanh(), lr=0.1))
        return found, sum(shard.numel() for shard in network.shards.values())


def test_the_example_with_owners_has_the_losses_of_shards(ranks):
    shards = ranks.run(losses_of_the_example, 2, False)
    owned = ranks.run(losses_of_the_example, 2, True)
    assert [losses for losses, _ in owned] == [losses for losses, _ in shards]
    assert [held for _, held in shards] == [544, 544]
    assert sorted(held for _, held in owned) == [64, 1024]


def test_the_example_learns_with_two_ranks_under_torchrun():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE), "--steps", "41"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", ended.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0] / 5
    assert "this rank holds 544 of 1088 weights" in ended.stdout
    # 41 steps, (1024 + 64) floats of 4 bytes, of which (N-1)/N = 1/2 is sent
    assert f"all-gather: 82 calls, {41 * 1088 * 4 // 2} bytes sent" in ended.stdout
