"""Signs of life: each rank publishes where it is, and looks at the others when it is stuck.

A thread writes one small record per rank to the process group's store every `beat` seconds: a
counter, the last call started, and whether the rank is up, has left or has failed. Nobody reads
records while collectives flow. A rank whose call has run for two beats reads the others' and ends
the wait early if they are evidence that it can never finish (`diagnosis.early_verdict`); a rank
whose call has failed watches them for a few beats to name who is gone.

Silence alone never ends a wait early: a rank may be starved of CPU for seconds and be fine.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from patrickstar.comm.call import Kind
from patrickstar.comm.diagnosis import Report, Stumble, Verdict, early_verdict, final_verdict
from patrickstar.comm.progress import Mark, Progress
from patrickstar.workers import Flag

_SILENT_BEATS = 4


class Store(Protocol):
    """What is needed of a `torch.distributed` store."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""

    def get(self, key: str, /) -> bytes:
        """Read a key."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


class Presence:
    """Publishes this rank's place and reads the others'.

    Args:
        store: shared by all ranks, with a prefix of its own.
        rank: this global rank.
        ranks: all global ranks that publish.
        progress: this rank's place.
        beat: seconds between two signs of life.
        on_verdict: called on the watching thread, once, with the evidence that a call which this
            rank waits in can never finish.
        poll: called before `progress` is looked at.
        host: the global rank whose process hosts the store; None: no rank's.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        progress: Progress,
        beat: float,
        on_verdict: Callable[[Kind, Mark, Verdict], None],
        poll: Callable[[], None],
        host: int | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = tuple(other for other in ranks if other != rank)
        self._progress = progress
        self._beat = beat
        self._on_verdict = on_verdict
        self._poll = poll
        self._host = host
        self._lock = threading.Lock()
        self._count = 0
        self._status = "up"
        self._verdict: Verdict | None = None
        self._stumble: tuple[str, float, tuple[int, ...]] | None = None
        self._stopped = Flag()
        self._thread = threading.Thread(target=self._watch, name="patrickstar-watch", daemon=True)
        self._publish()
        self._thread.start()

    def failed(self, verdict: Verdict) -> None:
        """Publish that this rank has stopped, and why. Only the first verdict counts."""
        with self._lock:
            if self._status != "up":
                return
            self._status, self._verdict = "failed", verdict
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._publish()

    def stumbled(self, reason: str) -> None:
        """Publish that this rank's caller met an exception; it counts until something begins."""
        with self._lock:
            self._stumble = (reason, time.monotonic(), self._places())

    def resumed(self) -> None:
        """The caller goes on."""
        self._stumble = None

    def leave(self) -> None:
        """Publish that this rank takes part no longer, and stop publishing."""
        with self._lock:
            if self._status == "up":
                self._status = "left"
        if not self._stopped.is_set():
            self._stopped.set()
            with contextlib.suppress(RuntimeError):
                self._publish()

    def diagnose(self, kind: Kind, mine: Mark, cause: str) -> Verdict:
        """Watch the others for a few beats and return who is to blame for a failed call."""
        try:
            first = self._read()
            deadline = time.monotonic() + _SILENT_BEATS * self._beat
            latest = first
            while time.monotonic() < deadline:
                verdict = early_verdict(self._rank, kind, mine, _reports(latest))
                if verdict is not None and verdict.ranks:
                    return verdict
                if all(latest[rank]["count"] != first[rank]["count"] for rank in latest):
                    break  # everyone is alive
                time.sleep(self._beat / 2)
                latest = self._read()
            silent = {rank for rank in latest if latest[rank]["count"] == first[rank]["count"]}
            return final_verdict(self._rank, kind, mine, _reports(latest, silent), cause)
        except RuntimeError as error:
            host = "the launcher's agent" if self._host is None else f"rank {self._host}"
            return Verdict(
                () if self._host is None else (self._host,),
                f"{host} hosts the store that ranks meet at, which is gone ({error}; {cause})",
            )

    def _watch(self) -> None:
        told = False
        while not self._stopped.wait(self._beat):
            try:
                self._poll()
                self._publish()
                for kind, mark in self._progress.marks().items():
                    if told or not mark.running:
                        continue
                    if time.monotonic() - mark.since < 2 * self._beat:
                        continue
                    verdict = early_verdict(self._rank, kind, mark, _reports(self._read()))
                    if verdict is not None and self._progress.marks()[kind] == mark:
                        told = True
                        self._on_verdict(kind, mark, verdict)
            except RuntimeError:
                # The store is gone. A collective will fail or time out and `diagnose` says so; if
                # none does, the run has ended and nobody needs a sign.
                return

    def _publish(self) -> None:
        with self._lock:
            self._count += 1
            record: dict[str, Any] = {"count": self._count, "status": self._status}
            if self._verdict is not None:
                record["verdict"] = [list(self._verdict.ranks), self._verdict.reason]
            stumble = self._stumble
            if stumble is not None and stumble[2] == self._places():
                record["stumble"] = [stumble[0], (time.monotonic() - stumble[1]) / self._beat]
            marks = self._progress.marks()
            record["marks"] = {
                kind.value: [mark.seq, mark.tag, mark.label] for kind, mark in marks.items()
            }
            self._store.set(str(self._rank), json.dumps(record))

    def _places(self) -> tuple[int, ...]:
        return tuple(mark.seq for mark in self._progress.marks().values())

    def _read(self) -> dict[int, dict[str, Any]]:
        return {rank: self._read_one(str(rank)) for rank in self._others}

    def _read_one(self, key: str) -> dict[str, Any]:
        if not self._store.check([key]):  # a get would block until the rank has started
            return {
                "count": 0,
                "status": "up",
                "marks": {kind.value: [0, 0, "nothing"] for kind in Kind},
            }
        record: dict[str, Any] = json.loads(self._store.get(key))
        return record


def _reports(
    records: dict[int, dict[str, Any]], silent: set[int] | None = None
) -> dict[int, Report]:
    reports = {}
    for rank, record in records.items():
        verdict, stumble = record.get("verdict"), record.get("stumble")
        reports[rank] = Report(
            status=record["status"],
            silent=rank in (silent or ()),
            marks={
                Kind(kind): Mark(seq, tag, label)
                for kind, (seq, tag, label) in record["marks"].items()
            },
            verdict=None if verdict is None else Verdict(tuple(verdict[0]), verdict[1]),
            stumble=None if stumble is None else Stumble(*stumble),
        )
    return reports
