"""Signs of life between ranks that share a store, within one process."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from patrickstar.comm.call import Call, Kind
from patrickstar.comm.diagnosis import Verdict
from patrickstar.comm.presence import Presence
from patrickstar.comm.progress import Mark, Progress

BEAT = 0.05


def call(seq: int, chunk: str = "c") -> Call:
    return Call(Kind.DATA, seq, "all-gather", chunk, 4, "float32")


def mark(of: Call) -> Mark:
    return Mark(of.seq, of.tag, str(of), True)


class Rank:
    """A rank's presence, and the verdicts it was given early."""

    def __init__(self, store, rank: int, size: int = 2, host: int | None = None) -> None:
        self.progress = Progress()
        self.verdicts: list[Verdict] = []
        self.told = threading.Event()
        self.polls = 0
        self.presence = Presence(
            store, rank, range(size), self.progress, BEAT, self._verdict, self._poll, host
        )

    def _verdict(self, kind: Kind, mine: Mark, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.told.set()

    def _poll(self) -> None:
        self.polls += 1


@pytest.fixture
def pair():
    store = HashStore()
    ranks = Rank(store, 0), Rank(store, 1)
    yield ranks
    for rank in ranks:
        rank.presence.leave()


def test_a_living_rank_that_waits_in_the_same_call_is_not_blamed(pair):
    for rank in pair:
        rank.progress.start(call(1))
    assert pair[0].presence.diagnose(Kind.DATA, mark(call(1)), "cause") == Verdict((), "cause")
    assert pair[0].polls > 0


def test_a_rank_that_stops_publishing_is_silent_after_a_few_beats(pair):
    # Stopped without a word, as a killed process is.
    pair[1].presence._stopped.set()
    pair[1].presence._thread.join()
    start = time.monotonic()
    verdict = pair[0].presence.diagnose(Kind.DATA, mark(call(1)), "connection closed")
    assert verdict == Verdict((1,), "rank 1 gave no sign of life (connection closed)")
    assert time.monotonic() - start < 20 * BEAT


def test_a_stuck_rank_is_told_early_what_the_other_runs_and_only_once(pair):
    pair[1].progress.start(call(1, "other"))
    pair[0].progress.start(call(1))
    assert pair[0].told.wait(40 * BEAT)
    time.sleep(4 * BEAT)
    (verdict,) = pair[0].verdicts
    assert verdict.ranks == (1,) and "'other'" in verdict.reason


def test_a_call_that_has_finished_is_not_looked_at(pair):
    pair[1].progress.start(call(1, "other"))
    pair[0].progress.start(call(1))
    pair[0].progress.finish(call(1))
    time.sleep(6 * BEAT)
    assert pair[0].verdicts == []


def test_a_failed_ranks_verdict_reaches_a_stuck_rank_and_outlives_its_leaving(pair):
    cause = Verdict((7,), "rank 7 gave no sign of life")
    pair[1].presence.failed(cause)
    pair[1].presence.failed(Verdict((0,), "a later one"))
    pair[1].presence.leave()
    pair[0].progress.start(call(1))
    assert pair[0].told.wait(40 * BEAT)
    assert pair[0].verdicts == [cause]


def test_an_exception_counts_until_the_rank_goes_on(pair):
    pair[1].presence.stumbled("KeyError: 'x'")
    pair[0].progress.start(call(1))
    assert pair[0].told.wait(80 * BEAT)
    assert pair[0].verdicts[0].ranks == (1,) and "KeyError" in pair[0].verdicts[0].reason
    for goes_on in (pair[1].presence.resumed, lambda: pair[1].progress.start(call(1))):
        pair[1].presence.stumbled("KeyError: 'y'")
        goes_on()
        pair[1].presence._publish()
        assert b"KeyError" not in pair[0].presence._store.get("1")


def test_a_rank_that_left_is_named(pair):
    pair[1].presence.leave()
    verdict = pair[0].presence.diagnose(Kind.CONTROL, Mark(1, 5, "barrier", True), "late")
    assert verdict.ranks == (1,) and "closed the communicator" in verdict.reason


def test_a_rank_that_has_not_started_yet_is_blamed_and_nobody_waits_for_its_record():
    rank = Rank(HashStore(), 0, size=2)
    verdict = rank.presence.diagnose(Kind.DATA, mark(call(1)), "late")
    rank.presence.leave()
    assert verdict.ranks == (1,)


class DyingStore:
    """A store whose host can be lost."""

    def __init__(self) -> None:
        self.alive = True
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._check()
        self.kept[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._check()
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.kept for key in keys)

    def _check(self) -> None:
        if not self.alive:
            raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(("host", "name"), [(0, "rank 0"), (None, "the launcher's agent")])
def test_a_lost_store_points_at_its_host_and_leaving_still_works(host, name):
    store = DyingStore()
    rank = Rank(store, 1, host=host)
    store.alive = False
    verdict = rank.presence.diagnose(Kind.DATA, mark(call(1)), "connection closed")
    assert verdict.ranks == (() if host is None else (host,))
    assert f"{name} hosts the store" in verdict.reason and "Broken pipe" in verdict.reason
    rank.presence.failed(verdict)
    rank.presence.leave()
