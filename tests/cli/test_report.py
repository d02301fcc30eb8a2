"""`patrickstar report` and `patrickstar trace`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patrickstar.cli import app

from ..report.written import events, step, write


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def test_a_run_becomes_a_page_beside_it_or_where_one_wants_it(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    run = write(tmp_path / "run", [step(1)], events())
    code, told, _ = invoke("report", run)
    assert code == 0 and str(run / "report.html") in told.replace("\n", "")
    text = (run / "report.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and "plotly.js v" in text
    code, _, _ = invoke("report", run, "--output", tmp_path / "deep" / "first.html", "--step", 1)
    assert code == 0 and (tmp_path / "deep" / "first.html").exists()
    assert sorted(file.name for file in (tmp_path / "deep").iterdir()) == ["first.html"]


def test_what_is_missing_of_a_run_is_said(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    code, _, told = invoke("report", write(tmp_path / "run", [step(1)], events()[:8]))
    assert code == 0 and "did not end with an update" in told


def test_no_run_no_step_and_no_place_to_write_are_usage_errors_and_damage_is_none(
    tmp_path: Path,
) -> None:
    for command in ("report", "trace"):
        for missing in (tmp_path / "none", tmp_path):
            code, _, told = invoke(command, missing)
            assert code == 2 and told.startswith("patrickstar: ") and "--record" in told
    run = write(tmp_path / "run", [step(1)], events())
    code, _, told = invoke("report", run, "--step", 9)
    assert code == 2 and "steps with events: 1" in told
    code, _, told = invoke("trace", run, "--output", run / "facts.json" / "x.json")
    assert code == 2 and "choose another --output" in told
    (run / "facts.json").write_text("{")
    code, _, told = invoke("report", run)
    assert code == 1 and "damaged" in told


def test_without_plotly_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    code, _, told = invoke("report", write(tmp_path / "run", [step(1)], events()))
    assert code == 1 and "patrickstar[report]" in told
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_trace_is_json_also_of_a_run_without_events(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [step(1)], events())
    code, told, _ = invoke("trace", run)
    assert code == 0 and "perfetto" in told
    made = json.loads((run / "trace.json").read_text())
    assert set(made) == {"displayTimeUnit", "traceEvents"}
    assert any(event["ph"] == "X" for event in made["traceEvents"])
    (run / "events.jsonl").unlink()
    assert invoke("trace", run)[0] == 0
    assert all(e["ph"] == "M" for e in json.loads((run / "trace.json").read_text())["traceEvents"])


@pytest.mark.parametrize("command", ["report", "trace"])
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], terminal_width=80).stdout
    assert len(shown.splitlines()) <= 24
    assert f"patrickstar {command} runs/first" in shown
