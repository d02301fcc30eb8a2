"""The page that is made from the table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from patrickstar.config.key import Status
from patrickstar.config.keys import TABLE
from patrickstar.config.reference import main, page

PAGE = Path(__file__).parents[2] / "docs" / "deepspeed-config.md"
ROW = re.compile(r"\| `([^`]+)` \| .* \| (?:\*\*)?(honoured|accepted|rejected)(?:\*\*)? \| .+ \|")


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m patrickstar.config.reference docs/deepspeed-config.md"
    )


def test_every_key_has_one_row_with_its_status() -> None:
    rows = [match.groups() for line in page().splitlines() if (match := ROW.fullmatch(line))]
    status = {path: key.status.value for path, key in TABLE.items()}
    assert dict(rows) == {path: status[path] for path, _ in rows}
    assert len(rows) == len(dict(rows))
    left_out = set(TABLE) - {path for path, _ in rows}
    assert left_out <= {"patrickstar"}  # it has a heading


def test_the_counts_in_the_text_are_those_of_the_table() -> None:
    for status in Status:
        count = sum(key.status is status for key in TABLE.values())
        assert f"{count} " in page()
        assert f"{count} are {status.value}" in page() or f"{count} {status.value}" in page()


def test_it_is_written_to_the_file_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tmp_path / "page.md")])
    assert capsys.readouterr().out == ""
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page()


def test_the_command_prints_the_page() -> None:
    command = [sys.executable, "-W", "error", "-m", "patrickstar.config.reference"]
    printed = subprocess.run(
        command, capture_output=True, check=True, text=True, cwd=PAGE.parent.parent
    )
    assert printed.stdout == page()
