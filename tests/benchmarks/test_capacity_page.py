"""The table of the largest model that each can train."""

from __future__ import annotations

from benchmarks.capacity_page import capacity


def test_a_row_says_what_was_trained_or_why_it_was_not() -> None:
    run = {
        "parameters": 2**30,
        "losses": [3.0, 2.0, 1.5],
        "step_s": [9.0, 5.0, 5.0],
        "disk_read": [0, 2**30, 2**30],
        "disk_written": [0, 2**31, 2**31],
        "process": {"max_rss": 3 << 30, "others_cpu": 0.25},
    }
    row = {"name": "Ours", "model": "big", "options": {"a": 1}, "not_measured": None}
    other = {**row, "name": "Theirs", "not_measured": "killed", "runs": []}
    machine = [{"memory_bytes": 2**34, "cores": 2, "disk_free": 2**36}]
    page = "\n".join(
        capacity(
            {
                "rows": {"ours": {**row, "runs": [run]}, "theirs": other},
                "machine": machine,
                "tokens": 512,
                "warmup": 1,
                "steps": 2,
                "started": "2026-01-01",
            }
        )
    )
    assert "| Ours | big (1.07B) | 14.0 | 3.0 | 5.0 | 1.0 + 2.0 | 3.000 → 2.000 → 1.500 |" in page
    assert "| Theirs | big |  |  |  |  | not trained: killed |" in page
