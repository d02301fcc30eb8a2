"""A recorded run: the same numbers, and files that agree with the engine."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import patrickstar
from patrickstar.engine.recording import EVERY, FIRST, Recording
from patrickstar.models import GPT, preset
from patrickstar.report import read_run, trace_events
from patrickstar.report.timeline import overlap, rows
from tests.engine import data_parallel
from tests.engine.data_parallel import Case, config

HOST = "10MiB"


def train(folder: Path, record: Path | None, steps: int = 4) -> tuple[list[float], dict[str, int]]:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "patrickstar": {"memory": {"host": HOST, "disk": str(folder)}},
    }
    if record is not None:
        config["patrickstar"]["record"] = str(record)
    engine, optimizer = patrickstar.initialize_engine(lambda: GPT(preset("gpt-tiny")), config)
    tokens = torch.randint(0, 256, (1, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = engine(tokens, tokens)
        losses.append(loss.item())
        engine.backward(loss)
        del loss
        optimizer.step()
        optimizer.zero_grad()
    engine.memory.settle()
    moved = engine.memory_report().moved
    engine.close()
    return losses, moved


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    train(folder, folder / "run")
    return folder / "run"


def test_recording_changes_no_number(tmp_path: Path, run: Path) -> None:
    losses, _ = train(tmp_path, None)
    recorded = [line["loss"] for line in lines(run / "steps.jsonl")]
    assert recorded == losses


def test_every_step_has_a_line_with_what_it_took(run: Path) -> None:
    steps = lines(run / "steps.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        assert line["step_time_s"] > 0
        assert line["lr"] == pytest.approx(1e-3)
        assert line["grad_norm"] > 0
        assert 0 < line["peak_bytes"]["host"] <= 10 << 20


def test_segments_moments_and_transfers_of_a_step_are_in_order(run: Path) -> None:
    events = lines(run / "events.jsonl")
    first = events[: next(i for i, e in enumerate(events) if e["event"] == "end") + 1]
    assert first[0]["event"] == "iteration"
    assert first[0]["planned"] is False
    segments = [e for e in first if e["event"] == "segment"]
    assert [e["kind"] for e in segments] == ["forward", "backward", "step"]
    for before, after in itertools.pairwise(segments):
        assert before["begin"] <= before["end"] <= after["begin"]
    assert sum(e["event"] == "moment" for e in first) > 20
    for transfer in (e for e in events if e["event"] == "transfer"):
        assert transfer["begin"] <= transfer["end"] <= transfer["time"]
        assert {transfer["source"], transfer["target"]} == {"host", "disk"}


def test_every_chunk_is_updated_once_a_step_in_the_step_or_in_the_next_forward(run: Path) -> None:
    steps: list[list[dict[str, Any]]] = []
    for event in lines(run / "events.jsonl"):
        if event["event"] == "iteration":
            steps.append([])
        steps[-1].append(event)
    updates = [[e for e in step if e["event"] == "update"] for step in steps]
    assert len(updates[0]) == len({e["chunk"] for e in updates[0]}) > 0
    assert updates[1] == [], "the second step leaves them to the third"
    assert {e["chunk"] for e in updates[2]} == {e["chunk"] for e in updates[0]}
    (forward,) = [e for e in steps[2] if e["event"] == "segment" and e["kind"] == "forward"]
    assert all(forward["begin"] <= e["begin"] <= e["end"] <= forward["end"] for e in updates[2])


def test_memory_by_kind_stays_inside_the_budget_and_knows_every_kind(run: Path) -> None:
    kinds: set[str] = set()
    for event in lines(run / "events.jsonl"):
        if event["event"] == "memory" and event["tier"] == "host":
            assert sum(event["bytes"].values()) <= 10 << 20
            assert all(nbytes >= 0 for nbytes in event["bytes"].values())
            kinds |= set(event["bytes"])
    assert kinds == {"parameter", "master", "gradient", "moments", "other"}


def test_residents_and_later_places_explain_every_departure(run: Path) -> None:
    here: set[tuple[int, str]] = set()
    reasons: set[str] = set()
    for event in lines(run / "events.jsonl"):
        if event["event"] == "iteration":
            here = set()
        elif event["event"] in ("resident", "placed"):
            assert (event["chunk"], event["tier"]) not in here
            here.add((event["chunk"], event["tier"]))
        elif event["event"] == "left":
            here.remove((event["chunk"], event["tier"]))
            reasons.add(event["why"])
    assert "plan" in reasons
    assert reasons <= {"plan", "room", "written", "released"}


def test_the_plan_and_the_facts_of_the_run_are_there(run: Path) -> None:
    plans = json.loads((run / "plan.json").read_text())["plans"]
    for plan in plans:
        assert plan["tiers"]["host"]["peak"] <= 10 << 20
        assert len(plan["tiers"]["host"]["in_use"]) == plan["moments"]
    begins = [e for e in lines(run / "events.jsonl") if e["event"] == "iteration"]
    assert [e["plan"] for e in begins] == [None, 0, 1, 1], "the third step has updates to make"
    facts = json.loads((run / "facts.json").read_text())
    assert facts["tiers"][0] == {"name": "host", "budget": 10 << 20}
    assert facts["parameters"] > 0
    names = [name for weights in facts["weights"] for name in weights["names"]]
    assert {"tokens.weight", "blocks.0.attention.qkv.weight"} <= set(names)
    known = {e["chunk"] for e in lines(run / "events.jsonl") if e["event"] == "chunk"}
    assert known <= {chunk for weights in facts["weights"] for chunk in weights["chunks"]}


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(patrickstar.ConfigError, match="run folder"):
        train(tmp_path, tmp_path / "file")


class Silent:
    def __init__(self) -> None:
        self.noted: list[int] = []
        self.steps = 0

    def events(self, events: Any) -> None:
        self.noted.append(events[0]["step"])

    def step(self, metrics: Any) -> None:
        self.steps += 1

    def plan(self, plan: Any) -> None:
        raise AssertionError("no iteration had a plan")


def test_of_a_long_run_some_steps_have_events_and_all_have_metrics() -> None:
    sink = Silent()
    recording = Recording(["host"], sink)
    for _ in range(30 * EVERY):
        recording.began_iteration(None)
        recording.ended_iteration(complete=True)
    assert sink.steps == 30 * EVERY
    assert sink.noted[: FIRST + 1] == [*range(1, FIRST + 1), EVERY]
    assert len(sink.noted) == 20


def test_an_abandoned_iteration_is_noted_and_makes_no_step() -> None:
    sink = Silent()
    recording = Recording(["host"], sink)
    recording.began_iteration(None)
    recording.ended_iteration(complete=False)
    assert (sink.steps, sink.noted) == (0, [1])


def on_two_ranks(rank: int, size: int, folder: str) -> None:
    case = Case(stage=3, memory={"host": "2MiB", "spool": True}, precision="bf16", steps=3)
    found = config(case, folder)["patrickstar"]
    recorded = {"patrickstar": {**found, "record": f"{folder}/run"}}
    data_parallel.train(rank, size, case, config=recorded)


def test_collectives_are_recorded_and_shown(ranks: Any, tmp_path: Path) -> None:
    ranks.run(on_two_ranks, 2, str(tmp_path))
    run = read_run(tmp_path / "run")
    assert run.notices == []
    collectives = [event for event in run.events if event.event == "collective"]
    assert {event.name for event in collectives} == {"all-gather", "reduce-scatter"}
    whole = run.events[0].time, run.events[-1].time
    assert all(whole[0] <= e.begin < e.end <= whole[1] for e in collectives)
    assert "collectives" in rows(run.events, run.chunks)
    spent = overlap(run.events)
    assert 0 < spent.sending_beside <= spent.sending < spent.whole
    names = {e["name"] for e in trace_events(run.events, run.budgets) if e["ph"] == "X"}
    assert "all-gather" in names
