"""Hostile inputs for everything that reads what somebody else may have written.

Each reader is given inputs by hypothesis: mostly proper ones with something changed, so that they
get past the first check. Whatever it is given it must return or raise the error that it documents.
Memory is limited, so that an input that makes a reader allocate without end is found out too.
"""

from __future__ import annotations

import resource
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

from soak.hostile import Reader, readers
from soak.tally import Tally
from soak.watched import run_all

MOST_MEMORY = 4 << 30  # bytes of address space that a reader may add
LONGEST = 10.0  # seconds for one input


@dataclass
class Found:
    tried: int = 0
    refused: int = 0
    lost: str | None = None


def fuzz(reader: Reader, count: int, seed: int) -> dict[str, Any]:
    """Give `reader` at least `count` inputs."""
    found = Found()
    address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address + MOST_MEMORY, hard))
    rounds = 0
    while found.tried < count and found.lost is None:
        rounds += 1
        _one_round(reader, count - found.tried, seed * 1000 + rounds, found)
    return {"tried": found.tried, "refused": found.refused, "lost": found.lost}


def _one_round(reader: Reader, count: int, seed: int, found: Found) -> None:
    def one(value: Any) -> None:
        found.tried += 1
        began = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                reader.read(value)
            except reader.errors as error:
                found.refused += 1
                told = str(error)
            else:
                told = "it was read"
        assert told.strip(), "an error without a message"
        assert time.monotonic() - began < LONGEST, "it took too long"

    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    test = settings(hypothesis.seed(seed)(hypothesis.given(value=reader.inputs)(one)))
    try:
        test()
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        last = traceback.extract_tb(error.__traceback__)[-1]
        found.lost = (
            f"{type(error).__name__}: {str(error)[:300]} "
            f"({Path(last.filename).name}:{last.lineno}) {notes[:600]}"
        )


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Give the readers `count` inputs in all."""
    known = readers(folder)
    whole = sum(reader.share for reader in known)

    def work(reader: Reader) -> Callable[[Callable[[], None]], Any]:
        return lambda ready: fuzz(reader, max(1, count * reader.share // whole), seed)

    jobs = [(reader, work(reader)) for reader in known]
    tallies = []
    for reader, outcome in run_all(jobs, workers=workers, limit=1500.0):
        tally = Tally(f"hostile inputs: {reader.name}")
        value = outcome.value or {"tried": 1, "refused": 0, "lost": outcome.error}
        tally.tried = value["tried"]
        tally.lost = [value["lost"]] if value["lost"] else []
        tally.seen["refused with the documented error"] = value["refused"]
        tallies.append(tally)
    return sorted(tallies, key=lambda tally: tally.what)
