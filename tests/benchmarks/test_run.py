"""The process that starts the rows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.job import Job
from benchmarks.run import ROOT, NotMeasuredError, Settings, measure_table, run_child
from benchmarks.systems import chunked
from benchmarks.tables import TABLES
from patrickstar.config import load_config


def settings(folder: Path, limit: float = 60.0, opponents: tuple[str, ...] = ()) -> Settings:
    return Settings(1, 0, 1, 1, opponents, sys.executable, str(folder), folder, limit, 1 << 20)


MEASURE = """
import pathlib, sys
from benchmarks.run import Settings, run_child

folder = pathlib.Path(sys.argv[1])
settings = Settings(1, 0, 1, 1, (), sys.executable, str(folder), folder, 60.0, 1 << 20)
code = "block = bytearray(900 << 20); del block"
kernel = run_child([sys.executable, "-c", code], folder / "log", settings)
print(kernel["max_rss"], kernel["cpu_s"])
"""


def test_the_peak_is_that_of_the_finished_process(tmp_path: Path) -> None:
    # From a lean process, as `make bench` starts one: what the parent holds when it forks counts
    # into the peak of the child (ru_maxrss, getrusage(2)), and a process of tests holds a lot.
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    peak, cpu = (float(word) for word in out.split())
    assert 900 << 20 < peak < 1000 << 20
    assert cpu > 0


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match="status 1: ValueError: no such thing"):
        run_child(
            [sys.executable, "-c", "raise ValueError('no such thing')"],
            tmp_path / "log",
            settings(tmp_path),
        )


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match="longer than 1 s"):
        run_child(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            tmp_path / "log",
            settings(tmp_path, limit=1.0),
        )


def test_opponents_left_out_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.run.facts", lambda _: {})
    measure_table(TABLES["first"], settings(tmp_path))
    assert '"not_measured": "left out of this run"' in (tmp_path / "first.json").read_text()


@pytest.mark.parametrize("name", list(TABLES))
def test_every_row_of_ours_has_a_config_that_the_library_takes(name: str, tmp_path: Path) -> None:
    for row in TABLES[name].rows:
        if row.opponent == "patrickstar":
            job = Job(row.system, TABLES[name].model, row.options, disk=str(tmp_path))
            load_config(chunked.config_of(job))


def test_rounds_can_be_added_to_results_of_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"step_s": [1.0], "process": {"max_rss": 1, "others_cpu": 0.0}}
    monkeypatch.setattr("benchmarks.run.facts", lambda _: {})
    monkeypatch.setattr("benchmarks.run.measure_once", lambda *_: run)
    how = settings(tmp_path, opponents=("plain",))
    measure_table(TABLES["small"], how)
    measure_table(TABLES["small"], dataclasses.replace(how, add=True))
    result = json.loads((tmp_path / "small.json").read_text())
    assert len(result["rows"]["plain"]["runs"]) == 2
    assert len(result["machine"]) == 4
    with pytest.raises(SystemExit, match="other steps or settings"):
        measure_table(TABLES["small"], dataclasses.replace(how, add=True, steps=9))


def test_a_process_that_is_killed_says_what_it_held(tmp_path: Path) -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(NotMeasuredError, match=r"when it held 0\.\d GiB: no memory was left"):
        run_child([sys.executable, "-c", kill], tmp_path / "log", settings(tmp_path))


def test_a_table_can_have_steps_of_its_own(tmp_path: Path) -> None:
    assert settings(tmp_path).of(TABLES["first"]) == settings(tmp_path)
    own = settings(tmp_path).of(TABLES["capacity"])
    assert (own.steps, own.warmup, own.time_limit) == (3, 1, 1800.0)
