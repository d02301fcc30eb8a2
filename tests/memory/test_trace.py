"""What a recorder notes of memory that no chunk owns."""

from __future__ import annotations

from patrickstar.memory.trace import Access, Recorder, Use


def test_what_is_there_when_a_moment_begins_counts_for_it() -> None:
    recorder = Recorder()
    recorder.other(0, 10)
    recorder.moment((Use(0, Access.READ),))
    recorder.other(0, 50)
    recorder.other(0, 30)
    recorder.moment((Use(1, Access.READ),))
    recorder.moment((Use(2, Access.READ),))
    assert [moment.other for moment in recorder.trace.moments] == [{0: 50}, {0: 30}, {0: 30}]
