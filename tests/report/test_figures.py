"""From recorded events to figures, by hand and against a real run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from patrickstar.report import read_run
from patrickstar.report.chunk_map import MOST_CHUNKS, MOST_STAYS, Stay, chosen, stays
from patrickstar.report.format import EVENT, Event
from patrickstar.report.memory import Level, levels, segments_by_moment, thinned
from patrickstar.report.reality import compared
from patrickstar.report.run import Run
from patrickstar.report.sections import sections
from patrickstar.report.timeline import Span, coalesced, length, overlap, rows, union

from .written import events

WRITTEN: list[Event] = [EVENT.validate_python(event) for event in events()]
SPANS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])),
    max_size=30,
)


@pytest.fixture(scope="module")
def run(recorded: Path) -> Run:
    return read_run(recorded)


def test_what_is_there_all_the_time_is_other_and_the_rest_activations() -> None:
    first, second = levels(WRITTEN, "host")
    assert (first.moment, first.used) == (
        0, {"parameter": 100, "moments": 200, "activations": 50, "other": 7},
    )  # fmt: skip
    assert (second.moment, second.used) == (1, {"moments": 200, "other": 7})
    assert levels(WRITTEN, "disk") == []


def test_levels_of_a_run_are_inside_the_budget_and_reach_the_peak_of_the_step(run: Run) -> None:
    found = levels(run.events, "host")
    assert len(found) > 20
    assert all(0 < level.total <= 10 << 20 for level in found)
    assert all(nbytes >= 0 for level in found for nbytes in level.used.values())
    # The peak of a step counts from the end of the one before.
    _, peaks = run.series.points("peak host")
    assert max(level.total for level in found) <= peaks[-1].mean


def test_thinning_keeps_the_fullest_moment() -> None:
    many = [Level(n, float(n), {"other": n % 97}) for n in range(1000)]
    few = thinned(many, most=50)
    assert len(few) <= 50
    assert max(level.total for level in few) == 96
    assert thinned([], most=50) == []


def test_parts_of_a_step_are_found_among_its_moments(run: Run) -> None:
    assert segments_by_moment(WRITTEN) == [("forward", 0, 2)]
    kinds = [kind for kind, _, _ in segments_by_moment(run.events)]
    assert kinds == ["forward", "backward", "step"]


def test_overlap_is_copying_without_waiting() -> None:
    spent = overlap(WRITTEN)
    assert (spent.whole, spent.waiting) == pytest.approx((2.0, 0.2))
    assert (spent.copying, spent.beside) == pytest.approx((0.6, 0.4))


@given(spans=SPANS)
def test_the_union_of_spans_covers_what_they_cover_once(spans: list[tuple[int, int]]) -> None:
    covered = {second for begin, end in spans for second in range(begin, end)}
    merged = union(spans)
    assert length(merged) == len(covered)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(spans=SPANS, most=st.integers(1, 10))
@example(spans=[(n, n + 50) for n in range(9)], most=1)  # all over each other
def test_coalesced_spans_cover_the_same_time_and_are_few(
    spans: list[tuple[int, int]], most: int
) -> None:
    few = coalesced([Span(*span) for span in spans], most)
    assert sum(span.count for span in few) == len(spans)
    assert all(0 <= span.filled <= 1 for span in few)
    filled = sum((span.end - span.begin) * span.filled for span in few)
    assert filled == pytest.approx(length(union(spans)), abs=1e-6) or len(few) == len(spans)
    assert len(few) <= max(2 * most + 1, most)
    covered = union((span.begin, span.end) for span in few)
    assert length(union([*covered, *spans])) == length(covered)


def test_copies_of_a_row_do_not_overlap(run: Run) -> None:
    found = rows(run.events, run.chunks)
    assert {"compute", "updates"} <= set(found)
    assert any("→" in name for name in found)
    for name, spans in found.items():
        if "→" in name:
            assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))


def test_stays_tell_where_a_chunk_was_and_why_it_left() -> None:
    assert sorted(stays(WRITTEN), key=lambda stay: (stay.chunk, stay.begin)) == [
        Stay(0, "host", 0.0, 1.1, "room"),
        Stay(1, "disk", 0.0, 2.0, None),
        Stay(1, "host", 0.4, 2.0, None),
    ]


def test_of_too_many_chunks_those_that_moved_most_are_drawn() -> None:
    many = [Stay(chunk, "host", 0, 1, None) for chunk in range(1000)]
    busy = [Stay(7, "disk", 0, 1, None)] * 3
    drawn = chosen(many + busy)
    assert len(drawn) == MOST_CHUNKS and 7 in drawn
    assert chosen([Stay(1, "host", 0, 1, None)] * (MOST_STAYS + 1)) == {1}


def test_the_plan_of_a_run_is_compared_tier_by_tier(run: Run) -> None:
    assert run.plan is not None
    found = {row.what: row for row in compared(run.events, run.plan, list(run.budgets))}
    assert set(found) == {"peak on the host", "disk → host", "host → disk"}
    peak = found["peak on the host"]
    assert peak.difference is not None and abs(peak.difference) < 0.05
    moved = sum(e.bytes for e in run.events if e.event == "transfer" and e.source == "disk")
    assert found["disk → host"].measured == moved > 0


def test_every_figure_is_one_that_plotly_knows(run: Run) -> None:
    objects = pytest.importorskip("plotly.graph_objects", reason="the extra `report` is missing")
    figures: list[Any] = [figure for section in sections(run) for _, figure in section.figures]
    assert len(figures) == 8
    for figure in figures:
        objects.Figure(figure)  # raises for a property that does not exist
