"""The table of parity: what is compared, and that what is trained is the same for everybody."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import half, runs, task
from benchmarks.parity.page import parity
from benchmarks.parity.table import MEMORY, REFERENCE, ROWS, compared, difference


def test_the_largest_difference_is_relative_and_drift_has_a_sign() -> None:
    found = difference([2.0, 4.2, 8.0, 7.9], [2.0, 4.0, 8.0, 8.0])
    assert found["largest"] == pytest.approx(0.05)
    assert found["drift"] == pytest.approx(-0.0125)


def test_a_run_that_failed_says_why_and_the_others_count() -> None:
    good = {"losses": [1.0, 1.0], "moved": 0}
    reference = {f"{m} {p}": good for m in task.MODELS for p in task.PRECISIONS}
    row = {**reference, "GPT bf16": "ValueError: no"}
    found = compared(row, reference)
    assert found["GPT bf16"] == "ValueError: no" and found["GPT fp32"]["largest"] == 0
    assert set(compared({"error": "gone"}, reference).values()) == {"gone"}


def test_every_stage_and_three_budgets_have_a_row() -> None:
    keys = [row.key for row in ROWS]
    assert keys.count(REFERENCE) == 1 and len(set(keys)) == len(keys)
    stages = [row.options["zero"]["stage"] for row in ROWS if row.system == "deepspeed"]
    assert set(stages) == {0, 1, 2, 3}
    assert sum(row.system == "patrickstar" for row in ROWS) == 3
    assert "chunked" in keys and "chunked" in [row.key for row in MEMORY]


def test_losses_fall_towards_the_two_bits_of_chance_in_the_tokens() -> None:
    tokens, targets = task.batch(3)
    chance = (targets - 5 * tokens) % task.VOCABULARY
    assert set(chance.flatten().tolist()) == {0, 1, 2, 3}
    assert not torch.equal(tokens, task.batch(4)[0])
    assert task.rate(0) == task.rate(1) == 0 and task.rate(500) == task.HYPER["lr"]
    assert math.log(4) < math.log(task.VOCABULARY)


@pytest.mark.parametrize("precision", task.PRECISIONS)
def test_a_few_steps_under_a_budget_agree_with_the_plain_loop(
    precision: str, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        losses: list[list[float]] = []
        for system, options in (("plain", {}), ("patrickstar", {"memory": {"host": "4MiB"}})):
            run = runs.SYSTEMS[system]("GPT", precision, options, str(tmp_path))
            losses.append([run.step(*task.batch(step)) for step in range(8)])
            run.close()
        bound = 1e-6 if precision == "fp32" else 2e-3
        assert difference(losses[1], losses[0])["largest"] <= bound
        assert losses[0][-1] < losses[0][0]
    finally:
        torch.set_num_threads(threads)


def test_the_poisoned_steps_overflow_and_the_others_do_not(tmp_path: Path) -> None:
    found = half.patrickstar(12, str(tmp_path))
    first = found["skipped"].index(False)
    assert first > 0, "the scale begins too large"
    assert not any(found["skipped"][first:])
    assert found["scales"][first] < found["scales"][0]


@pytest.fixture
def result() -> dict[str, Any]:
    found = {"largest": 1.5e-7, "drift": -2e-9, "moved": 1 << 20, "last_loss": 1.5}
    keys = [f"{m} {p}" for p in task.PRECISIONS for m in task.MODELS]
    row = {"name": "Ours", "options": {}, "compared": dict.fromkeys(keys, found)}
    return {
        "parts": [
            {
                "not_measured": None,
                "answer": {
                    "steps": 200,
                    "reference": "theirs",
                    "torch": "1",
                    "deepspeed": "2",
                    "rows": {"theirs": {**row, "name": "Theirs"}, "ours": row},
                    "fp16": {
                        "steps": 200, "skipped": 5, "grown": 2, "largest": 1e-3,
                        "same_scales": True, "same_skips": True,
                    },
                    "memory": {
                        "model": "gpt",
                        "rows": {
                            "a": {"name": "A", "error": None, "peak": 9 << 20, "losses": [1.0]},
                            "b": {"name": "B", "error": None, "peak": 4 << 20, "losses": [1.0]},
                        },
                    },
                },
            }
        ]
    }  # fmt: skip


def lines(result: dict[str, Any]) -> str:
    return "\n".join(parity(result))


def test_the_page_shows_what_was_found(result: dict[str, Any]) -> None:
    page = lines(result)
    assert "| Ours |" + " 1.5e-07 |" * 6 + " 2.0e-09 | 1.00 |" in page
    assert "the same scales and the same skipped steps" in page
    assert "| B | 4 | same bits |" in page


def test_what_is_not_so_is_not_hidden(result: dict[str, Any]) -> None:
    worse = copy.deepcopy(result)
    answer = worse["parts"][0]["answer"]
    answer["fp16"]["same_scales"] = False
    answer["memory"]["rows"]["b"]["losses"] = [1.1]
    answer["rows"]["ours"]["compared"]["GPT bf16"] = "NotImplementedError: no"
    page = lines(worse)
    assert "**not the same** scales" in page and "| B | 4 | differ |" in page
    assert "refused" in page and "NotImplementedError: no" in page
