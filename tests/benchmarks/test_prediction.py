"""Plans are compared with runs as the page says."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks.prediction import CASES, planned
from benchmarks.prediction_page import peak_errors, prediction, step_error, verdict_is_wrong
from benchmarks.systems.chunked import config_of
from patrickstar.config import load_config


@pytest.fixture
def case() -> dict[str, Any]:
    return {
        "case": "tiny-disk",
        "job": json.loads(CASES["tiny-disk"].to_json()),
        "plan": {
            "fits": True,
            "tiers": {"host": {"peak": 95 << 20}, "disk": {"peak": 50 << 20, "reserved": 80 << 20}},
            "step": {"total": 0.9, "bottleneck": "disk"},
        },
        "run": {
            "refused": None,
            "step_s": [9.0, 9.0, 9.0, 9.0, 0.5, 1.0, 1.0, 1.5],
            "notes": {
                "tier_peak": {"host": 100 << 20, "disk": 70 << 20},
                "tier_peak_later": {"host": 90 << 20, "disk": 50 << 20},
                "tier_reserved": {"host": 0, "disk": 80 << 20},
            },
        },
    }


def page(*cases: dict[str, Any]) -> str:
    parts = [{"answer": case, "process": {"others_cpu": 0.0}} for case in cases]
    parts.append({"arguments": ["--case", "none"], "not_measured": "no disk"})
    return "\n".join(prediction({"started": "2026-01-01", "parts": parts}))


def test_errors_are_relative_to_the_run(case: dict[str, Any]) -> None:
    assert step_error(case) == pytest.approx(-0.1)
    # A disk's use is that of planned steps, and its file is taken whole.
    assert peak_errors(case) == {"host": pytest.approx(-0.05), "disk": 0.0, "disk's file": 0.0}
    case["run"]["notes"]["tier_peak_later"]["disk"] = case["run"]["notes"]["tier_reserved"][
        "disk"
    ] = 0
    assert peak_errors(case).keys() == {"host"}  # a disk that holds nothing has none


def test_a_wrong_verdict_is_one_either_way(case: dict[str, Any]) -> None:
    assert not verdict_is_wrong(case)
    case["run"]["refused"] = "BudgetError: too small"
    assert verdict_is_wrong(case)
    case["plan"]["fits"] = False
    assert not verdict_is_wrong(case)


def test_the_page_counts_what_is_wrong_and_says_what_was_not_measured(case: dict[str, Any]) -> None:
    refused = copy.deepcopy(case)
    refused["run"] = {"refused": "BudgetError: too small"}
    shown = page(case, refused)
    assert "host 95 / 100" in shown
    assert "Wrong verdicts: 1 of 2" in shown
    assert "Largest error of a tier's peak: 5.0%" in shown
    assert "| none | not measured | no disk |" in shown


@pytest.mark.parametrize("name", list(CASES))
def test_a_case_has_a_config_that_the_library_takes(name: str) -> None:
    load_config(config_of(CASES[name]))


def test_a_case_is_planned() -> None:
    found = planned(CASES["tiny-disk"], machine="workstation-24gb")
    assert found["fits"]
    assert set(found["tiers"]) >= {"host", "disk"}
    json.dumps(found)
