"""Checkpoints and spool slots that come back damaged: found, named, and never trained on.

A file of a checkpoint loses its end, grows, vanishes, or has bits flipped; loading must say which
file it is and leave the run as it was. Bytes of a spool file are changed under a run that verifies
its disk; the run must end with an error at the latest when it uses them, or never read them.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patrickstar.errors import CheckpointError, SpoolError
from patrickstar.memory import DiskTier
from soak.disks import SPEC, STEPS, config, expected, prepare
from soak.tally import Tally
from soak.training import fingerprint, one_step, start
from soak.watched import run_all

LIMIT = 600.0  # seconds


def damaged(data: bytes, draw: random.Random) -> bytes | None:
    """Other bytes; None is no file."""
    act = draw.choice(["flip", "flip", "end", "longer", "none", "zeros"])
    if act == "none":
        return None
    if act == "longer":
        return data + bytes(draw.randint(1, 100))
    if act == "end":
        return data[: draw.randrange(len(data))]
    found, place = bytearray(data), draw.randrange(len(data))
    if act == "zeros":
        length = min(draw.choice([1, 512, 4096]), len(data) - place)
        found[place : place + length] = bytes(length)
    else:
        found[place] ^= 1 << draw.randrange(8)
    return bytes(found)


def checkpoints(count: int, seed: int, folder: Path) -> list[str | None]:
    """Load `count` damaged checkpoints into one run; for each why it was not refused well."""
    draw, runs = random.Random(seed), folder / "runs"
    engine, optimizer = start(SPEC, config("bf16", folder / "spool"))
    for batch in SPEC.batches(2):
        one_step(engine, optimizer, batch)
    engine.save_checkpoint(runs, "it")
    one_step(engine, optimizer, SPEC.batches(1)[0])
    before = fingerprint(engine)
    names, results = sorted(p.name for p in (runs / "it").iterdir()), []
    for _ in range(count):
        name = draw.choice(names)
        path = runs / "it" / name
        good = path.read_bytes()
        bad = damaged(good, draw)
        if bad == good:
            continue
        path.unlink() if bad is None else path.write_bytes(bad)
        why = None
        try:
            engine.load_checkpoint(runs, "it")
            why = f"{name} was damaged and nobody noticed"
        except CheckpointError as error:
            if name not in str(error) and "state.json" not in str(error):
                why = f"{name} was damaged and the error does not name it: {error}"
        path.write_bytes(good)
        path.chmod(0o600)
        results.append(why)
    if fingerprint(engine) != before:
        results.append("the run has other weights after refused loads")
    engine.load_checkpoint(runs, "it")
    engine.close()
    return results


def slots(number: int, seed: int, folder: Path) -> str | None:
    """Change bytes of the spool under a run; why that was not found."""
    draw = random.Random(f"{seed}/{number}")
    precision = draw.choice(["fp32", "bf16"])
    wanted = expected(precision)["losses"]
    engine, optimizer = start(SPEC, config(precision, folder / f"spool{number}"))
    (disk,) = (tier for tier in engine.memory.tiers if isinstance(tier, DiskTier))
    at, losses, hurt = draw.randrange(1, STEPS - 2), [], False
    try:
        for step, batch in enumerate(SPEC.batches(STEPS)):
            if step == at:
                engine.memory.settle()
                file = os.open(f"/proc/self/fd/{disk.spool._file}", os.O_RDWR)
                offset, length = draw.choice(draw.choice(list(disk.slots.values())).extents)
                if draw.random() < 0.3:
                    os.ftruncate(file, offset + length // 2)
                else:
                    place = offset + draw.randrange(length)
                    (old,) = os.pread(file, 1, place)
                    os.pwrite(file, bytes([old ^ 0x40]), place)
                os.close(file)
                hurt = True
            losses.append(one_step(engine, optimizer, batch))
    except SpoolError as error:
        if not hurt:
            return f"refused before anything was damaged: {error}"
        told = "not the bytes that were written" in str(error) or "ended after" in str(error)
        if not told:
            return f"another error: {error}"
    if losses != wanted[: len(losses)]:
        return f"damage of step {at} was trained on: {losses} instead of {wanted}"
    return None


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Damage `count` checkpoints, and a fourth as many spool slots."""
    prepare(folder)
    files = Tally("checkpoints with a file that is damaged, cut, longer or missing")
    disk = Tally("spool files with bytes changed or cut, under a run that verifies its disk")
    jobs: list[tuple[Any, Callable[[Callable[[], None]], Any]]] = [
        ((files, 0), lambda ready: checkpoints(count, seed, folder))
    ]
    jobs += [((disk, n), _slots(n, seed, folder)) for n in range(max(1, count // 4))]
    for (tally, number), outcome in run_all(jobs, workers=workers, limit=LIMIT):
        if outcome.error is not None:
            tally.failed(f"number {number}: {outcome.error}")
        elif tally is files:
            for why in outcome.value:
                tally.judge(why)
        else:
            tally.judge(None if outcome.value is None else f"number {number}: {outcome.value}")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    return [files, disk]


def _slots(number: int, seed: int, folder: Path) -> Callable[[Callable[[], None]], Any]:
    return lambda ready: slots(number, seed, folder)
