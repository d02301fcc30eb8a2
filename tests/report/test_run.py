"""Reading run folders: whole, cut short, damaged, huge, and none at all."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.report import RunFolderError, read_run
from patrickstar.report import run as reading
from patrickstar.report.sections import sections, tiles

from .written import events, step, write


def test_a_recorded_run_is_read_without_a_notice(recorded: Path) -> None:
    run = read_run(recorded)
    assert run.notices == []
    assert run.series.count == 4
    assert run.shown is not None and run.shown.step == 4 and run.shown.planned
    assert run.plan is not None and run.budgets["host"] == 10 << 20
    titles = [section.id for section in sections(run)]
    assert titles == ["curves", "memory", "timeline", "chunks", "plan", "run"]
    assert run.table["precision"] == "bfloat16"


def test_a_step_can_be_chosen_and_one_without_events_is_refused(recorded: Path) -> None:
    run = read_run(recorded, step=1)
    assert run.shown is not None and not run.shown.planned
    assert run.plan is None
    with pytest.raises(RunFolderError, match="step 9; steps with events: 1, 2, 3, 4"):
        read_run(recorded, step=9)


def test_what_is_no_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist; give one that"):
        read_run(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"facts.json is missing; record one"):
        read_run(tmp_path)
    (tmp_path / "facts.json").write_text("{}")
    with pytest.raises(RunFolderError, match="damaged"):
        read_run(tmp_path)
    with pytest.raises(RunFolderError, match="is no folder"):
        read_run(tmp_path / "facts.json")
    write(tmp_path, format=99)
    with pytest.raises(RunFolderError, match="format 99"):
        read_run(tmp_path)


def test_a_run_that_was_killed_anywhere_shows_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, [step(1), step(2)], events(1) + events(2))
    for name in ("steps.jsonl", "events.jsonl", "plan.json"):
        data = (tmp_path / name).read_bytes()
        for cut in range(0, len(data), 97):
            (tmp_path / name).write_bytes(data[:cut])
            run = read_run(tmp_path)
            assert sections(run)
        (tmp_path / name).write_bytes(data)


def test_a_step_that_was_cut_is_shown_with_a_notice_only_if_there_is_no_whole_one(
    tmp_path: Path,
) -> None:
    write(tmp_path, [step(1)], [*events(1), *events(2)[:9]])
    whole = read_run(tmp_path)
    assert whole.shown is not None and (whole.shown.step, whole.notices) == (1, [])
    write(tmp_path, [step(1)], events(2)[:9])
    cut = read_run(tmp_path)
    assert cut.shown is not None and len(cut.events) == 9
    assert any("did not end with an update" in notice for notice in cut.notices)


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    write(tmp_path)
    notices = " ".join(read_run(tmp_path).notices)
    assert "No step was completed" in notices and "No step has events" in notices
    assert [section.id for section in sections(read_run(tmp_path))] == ["run"]


def test_lines_that_cannot_be_read_are_counted_and_new_kinds_are_skipped(tmp_path: Path) -> None:
    happened = events()
    broken = {**happened[5], "bytes": {"parameter": "many"}}
    new = {"event": "weather", "time": 1.0}
    write(tmp_path, [step(1), {"step": "two"}], [*happened[:5], broken, new, *happened[6:]])
    run = read_run(tmp_path)
    assert len(run.events) == len(happened) - 1
    assert run.notices == [
        "1 line(s) of steps.jsonl could not be read.",
        "1 event(s) of step 1 could not be read.",
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_change_of_a_line_stops_a_report(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    happened = [dict(event) for event in events(plan=0)]
    steps = [step(1), step(2, peak_bytes={"host": 5}, moved_bytes={"disk->host": 9})]
    for line in [*happened, *steps]:
        if data.draw(st.integers(0, 5)) == 0:
            key = data.draw(st.sampled_from([k for k in line if k != "event"]))
            line[key] = data.draw(JSON)
    plan = {"moments": 2, "tiers": {"host": {"peak": 5, "loaded": 0, "saved": 0, "in_use": [5]}}}
    folder = write(tmp_path_factory.mktemp("fuzz"), steps, happened, [plan])
    json.dumps([f for s in sections(read_run(folder)) for f in s.figures], allow_nan=False)


def test_metrics_of_the_command_line_are_preferred_since_they_know_tokens(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1, tokens_per_s=8.0)) + "\n")
    assert read_run(tmp_path).series.mean("tokens_per_s") == 8.0


def test_a_huge_run_is_read_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_EVENTS", 500)
    moment = events()[6]
    write(tmp_path, [], [*events()[:6], *[moment] * 20_000])
    with (tmp_path / "steps.jsonl").open("w") as file:
        file.writelines(f'{{"step": {n}, "loss": 1, "step_time_s": 1}}\n' for n in range(20_000))
        file.write('{"step": ' + "9" * (5 << 20))  # a line of garbage without an end
    tracemalloc.start()
    run = read_run(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert run.series.count == 20_000 and len(run.series.steps) <= 2000
    assert len(run.events) == 500
    assert any("more than 500 events" in notice for notice in run.notices)


def test_the_speed_of_a_run_is_its_tokens_over_its_time(tmp_path: Path) -> None:
    write(tmp_path, [step(1)])
    slow, fast = step(1, step_time_s=3.0, tokens_per_s=2.0), step(2, step_time_s=1.0)
    lines = (slow, fast | {"tokens_per_s": 6.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert dict(tiles(read_run(tmp_path)))["tokens/s"] == "3"
