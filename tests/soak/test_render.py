"""The page of reliability has the table that the results give."""

from __future__ import annotations

from pathlib import Path

from soak.render import PAGE, ROOT, rendered, table
from soak.tally import Tally


def test_the_page_is_what_the_results_give() -> None:
    page = PAGE.read_text()
    assert rendered(page, ROOT / "soak" / "results") == page


def test_losses_are_counted_and_shown() -> None:
    tally = Tally("kills")
    tally.survived()
    tally.failed("it lost a checkpoint")
    tally.seen["while saving"] = 1
    result = {"part": "kills", "tallies": [tally.to_json()], "seconds": 60.0}
    made = table([{**result, "python": "3", "torch": "2"}])
    assert "| kills | kills | 2 | 1 | 1 | while saving: 1 |" in made
    assert "| | **all** | 2 | 1 | 1 | |" in made


def test_without_results_the_page_says_so(tmp_path: Path) -> None:
    assert "Not run yet." in rendered(PAGE.read_text(), tmp_path)
