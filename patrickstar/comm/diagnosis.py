"""Who is to blame when a collective does not finish: a pure function of what every rank published.

A broken connection or a timeout says only that *somebody* did not take part. The ranks publish
where they are (`presence.py`); from that and this rank's own place follows a verdict:

- a rank that has given no sign of life is dead or frozen;
- a rank that has stopped with a verdict of its own is believed, so that all survivors of one
  accident report the same cause;
- a rank that left before it came to this call will never take part;
- a rank that raised an exception, and has begun nothing for a while since, will not either;
- a rank that is at the same place with another call disagrees about the order;
- a rank that is alive and behind is late.

The first is known only after waiting for a sign, and the last is an error only once the time is
up; the other four are evidence at any time, and are used to end a wait early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from patrickstar.comm.call import Kind
from patrickstar.comm.progress import Mark


@dataclass(frozen=True)
class Verdict:
    """Ranks at fault and why, as the end of a sentence. `ranks` is empty when nobody is known."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Stumble:
    """An exception on a rank that lives on.

    Attributes:
        reason: the exception, for people.
        beats: for how long the rank has begun nothing since.
    """

    reason: str
    beats: float


PATIENT_BEATS = 8
"""How long after an exception a rank may still come: a caller that skips a batch takes a while."""


@dataclass(frozen=True)
class Report:
    """What one other rank has published last.

    Attributes:
        status: "up", "left" or "failed".
        silent: whether it published nothing new while it was watched for long enough.
        marks: the last call it started in each sequence.
        verdict: why it failed.
        stumble: an exception that it may or may not go on after.
    """

    status: str = "up"
    silent: bool = False
    marks: Mapping[Kind, Mark] = field(default_factory=dict)
    verdict: Verdict | None = None
    stumble: Stumble | None = None


def early_verdict(
    rank: int, kind: Kind, mine: Mark, others: Mapping[int, Report]
) -> Verdict | None:
    """Return a verdict that holds however long one waited, or None.

    Args:
        rank: this global rank.
        kind: the sequence in which it waits.
        mine: the call it waits in.
        others: the reports of the other ranks, by global rank.
    """
    for _, report in sorted(others.items()):
        if report.status == "failed" and report.verdict is not None:
            return report.verdict
    left = [
        other
        for other, report in others.items()
        if report.status == "left" and report.marks[kind].seq < mine.seq
    ]
    if left:
        return Verdict(
            tuple(sorted(left)),
            f"{_name(left)} closed the communicator or ended before it came to this call",
        )
    for other, report in sorted(others.items()):
        stumble = report.stumble
        behind = report.marks[kind].seq < mine.seq
        if stumble is not None and behind and stumble.beats >= PATIENT_BEATS:
            return Verdict(
                (other,),
                f"rank {other} raised {stumble.reason}, and has begun nothing since. An exception "
                "that one rank goes on after has to be raised on all of them",
            )
    here = {other: report.marks[kind] for other, report in others.items()} | {rank: mine}
    here = {other: here[other] for other in sorted(here) if here[other].seq == mine.seq}
    tags = [mark.tag for mark in here.values()]
    most = max(tags, key=tags.count)  # of equally many, what the lowest rank runs
    differing = tuple(other for other, mark in here.items() if mark.tag != most)
    if differing:
        calls = "; ".join(f"rank {other} runs {mark.label}" for other, mark in here.items())
        return Verdict(
            differing,
            f"ranks disagree about the next collective: {calls}; issue the same collectives in "
            "the same order on every rank (OrderedIssuer does)",
        )
    return None


def final_verdict(
    rank: int, kind: Kind, mine: Mark, others: Mapping[int, Report], cause: str
) -> Verdict:
    """Return the verdict on a call that has failed with `cause`; other arguments as above."""
    early = early_verdict(rank, kind, mine, others)
    if early is not None and early.ranks:
        return early
    silent = [other for other, report in others.items() if report.silent]
    if silent:
        return Verdict(tuple(sorted(silent)), f"{_name(silent)} gave no sign of life ({cause})")
    behind = {
        other: report.marks[kind]
        for other, report in sorted(others.items())
        if report.marks[kind].seq < mine.seq
    }
    if behind:
        places = "; ".join(
            f"rank {other} is alive but has not started it, the last it started is {mark.label}"
            for other, mark in behind.items()
        )
        return Verdict(tuple(behind), f"{places} ({cause})")
    return Verdict((), cause)


def _name(ranks: list[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
