"""The page about several ranks and its example, on ranks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import ROOT, RankPool

PAGE = ROOT / "docs" / "several-gpus.md"
EXAMPLE = ROOT / "examples" / "train_on_several_ranks.py"


def run_page(rank: int, size: int) -> None:
    # The block on tensor parallelism needs four ranks: tests/engine/test_tensor_parallel.py.
    run = r"(?<!<!-- not run -->\n)```python\n(.*?)```"
    blocks = re.findall(run, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    exec("\n".join(blocks), {})


def run_example(rank: int, size: int, folder: Path, steps: int) -> list[float]:
    specification = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert specification is not None and specification.loader is not None
    example: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    example.STEPS = steps
    return list(example.main(folder))


def test_the_code_on_the_page_is_one_program(ranks: RankPool) -> None:
    ranks.run(run_page, 2)


def test_the_example_goes_on_with_other_ranks_as_if_nothing_had_happened(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole = ranks.run(run_example, 1, tmp_path / "whole", 8)[0]
    begun = ranks.run(run_example, 2, tmp_path / "parts", 4)[0]
    ended = ranks.run(run_example, 1, tmp_path / "parts", 8)[0]
    assert [*begun, *ended] == pytest.approx(whole, rel=1e-5)
