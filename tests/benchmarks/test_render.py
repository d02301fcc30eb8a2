"""The page of benchmarks holds what the results say."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.render import PAGE, RESULTS, rendered
from benchmarks.tables import SCRIPTS, TABLES

PLACE = "before\n<!-- table first -->\nold\n<!-- end first -->\nafter\n"


def run_of(seconds: float, gib: float, losses: list[float]) -> dict[str, Any]:
    return {
        "parameters": 1_000_000,
        "losses": losses,
        "step_s": [9.0, seconds, seconds, seconds],
        "disk_read": [0, 2**30, 2**30, 2**30],
        "disk_written": [0, 0, 0, 0],
        "phases": {"forward": 0.1, "backward": 0.2, "update": 0.3},
        "import_rss": 2**28,
        "versions": {"torch": "1.2.3"},
        "notes": {},
        "process": {"max_rss": int(gib * 2**30), "others_cpu": 0.25},
    }


@pytest.fixture
def result() -> dict[str, Any]:
    disk = {"read": 1e9, "write": 2e9}
    facts = {
        "processor": "P",
        "cores": 2,
        "memory_bytes": 2**34,
        "file_system": "ext4",
        "torch": "1.2.3",
        "gemm_flops": 1e12,
        "copy_bytes_per_s": 1e10,
        "disk": disk,
    }
    row = {"name": "Plain", "opponent": "plain", "options": {}, "not_measured": None}
    return {
        "table": "first",
        "title": "T",
        "tokens": 512,
        "reference": "plain",
        "steps": 3,
        "warmup": 1,
        "started": "2026-01-01",
        "machine": [facts, facts],
        "rows": {
            "plain": {**row, "runs": [run_of(2.0, 4.0, [3.0, 2.0, 1.0, 0.5])]},
            "ours": {
                **row,
                "name": "Ours",
                "runs": [
                    run_of(8.0, 1.0, [3.0, 2.0, 1.0, 0.5]),
                    run_of(5.0, 1.5, [3.0, 2.0, 1.0, 0.5]),
                ],
            },
            "theirs": {**row, "name": "Theirs", "not_measured": "no such library", "runs": []},
        },
    }


def page(result: dict[str, Any], folder: Path) -> str:
    (folder / "first.json").write_text(json.dumps(result))
    return rendered(PLACE, folder)


def line_of(page: str, name: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_results_make_of_it() -> None:
    assert rendered(PAGE.read_text()) == PAGE.read_text(), "run python benchmarks/render.py"


def test_every_table_and_every_result_has_its_place_on_the_page() -> None:
    text = PAGE.read_text()
    for name in {*TABLES, *SCRIPTS, *(path.stem for path in RESULTS.glob("*.json"))}:
        assert f"<!-- table {name} -->" in text
        assert f"<!-- end {name} -->" in text


def test_what_stands_around_a_table_is_left_alone(result: dict[str, Any], tmp_path: Path) -> None:
    text = page(result, tmp_path)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert rendered(text, tmp_path) == text


def test_the_worst_peak_and_the_best_round_count(result: dict[str, Any], tmp_path: Path) -> None:
    cells = line_of(page(result, tmp_path), "Ours")
    assert cells[1:6] == ["1.50", "1.25", "not measured", "5.00", "2.50"]


def test_activations_are_not_counted_among_the_bytes_of_a_parameter(
    result: dict[str, Any], tmp_path: Path
) -> None:
    result["rows"]["ours"]["runs"][0]["notes"]["activations"] = 2**28
    text = page(result, tmp_path)
    assert line_of(text, "Ours")[3] == f"{2**30 / 1_000_000:.1f}"
    assert line_of(text, "Plain")[3] == f"{3.5 * 2**30 / 1_000_000:.1f}"


def test_a_row_that_could_not_be_measured_says_so_and_why(
    result: dict[str, Any], tmp_path: Path
) -> None:
    text = page(result, tmp_path)
    assert line_of(text, "Theirs")[1] == "not measured"
    assert "Theirs: not measured (no such library)" in text


def test_a_table_without_results_says_not_measured(tmp_path: Path) -> None:
    assert "not measured" in rendered(PLACE, tmp_path)


def test_losses_that_differ_are_not_called_the_same(result: dict[str, Any], tmp_path: Path) -> None:
    assert line_of(page(result, tmp_path), "Ours")[-1] == "same bits"
    other = copy.deepcopy(result)
    other["rows"]["ours"]["runs"][0]["losses"][-1] = 0.75
    assert line_of(page(other, tmp_path), "Ours")[-1] == "last differs by 2e-01"


def test_a_process_above_its_budget_breaks_the_promise_on_the_page(tmp_path: Path) -> None:
    answer = {"model": "M", "precision": "bf16", "parameters": 2_000_000, "allowed": 256 << 20}
    answer |= dict.fromkeys(("budget", "booked", "imports", "peak"), 5 << 20)
    parts = [
        {"arguments": [], "not_measured": None, "answer": {**answer, "above": above << 20}}
        for above in (256, 257)
    ]
    parts.append({"arguments": ["--model", "N"], "not_measured": "took too long"})
    result = {"kind": "rss", "started": "2026-01-01", "parts": parts}
    (tmp_path / "rss.json").write_text(json.dumps(result))
    text = rendered("<!-- table rss -->\n<!-- end rss -->\n", tmp_path)
    assert "| 256 | kept |" in text and "| 257 | **broken** |" in text
    assert "--model N: not measured (took too long)" in text
