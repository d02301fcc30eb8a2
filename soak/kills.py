"""Runs that are killed at random moments, also while they save, and go on from their checkpoints.

A run saves after every micro-batch, in turns at once and in the background, and takes the losses so
far along in its checkpoints. Chains of kills follow each other in one folder: after each the newest
checkpoint must be intact and no spool file may be left. When the chain is over, the run goes to its
end, and its losses and weights must be those of a run that nobody killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar.checkpoint import has_latest, open_checkpoint
from patrickstar.errors import CheckpointError
from soak.models import Spec
from soak.tally import Tally
from soak.training import config_for, fingerprint, one_step, start, warm_up
from soak.watched import run_all

MICRO_STEPS = 12
LONGEST_CHAIN = 6
TIME = 60.0  # seconds


def train(spec: Spec, config: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """A run to its end, from the newest checkpoint in `folder` on; its losses and weights."""
    engine, optimizer = start(spec, config)
    losses: list[str] = []
    if folder is not None and has_latest(folder):
        _, client = engine.load_checkpoint(folder)
        losses = client["losses"]
    for batch in spec.batches(MICRO_STEPS)[engine.micro_steps :]:
        losses.append(one_step(engine, optimizer, batch))
        if folder is not None:
            odd = engine.micro_steps % 2 == 1
            tag = f"micro{engine.micro_steps}"
            engine.save_checkpoint(folder, tag, {"losses": losses[:]}, keep=2, asynchronous=odd)
    engine.wait_for_checkpoint()
    result = {"losses": losses, "weights": fingerprint(engine)}
    engine.close()
    return result


@contextlib.contextmanager
def child(spec: Spec, config: dict[str, Any], folder: Path, answer: Path) -> Iterator[int]:
    """A process that trains; reaped at the end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            answer.write_text(json.dumps(train(spec, config, folder)))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code, or None if it is still running."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.0005)


def is_saving(folder: Path) -> bool:
    return any(folder.glob(".*.tmp-*"))


def kill_one(pid: int, folder: Path, draw: random.Random, longest: float, tally: Tally) -> bool:
    """Kill `pid` at some moment; whether it was still running then."""
    number = draw.choice([signal.SIGKILL, signal.SIGTERM])
    until = time.monotonic() + draw.uniform(0, longest)
    aimed = draw.random() < 0.6  # at a save, if there is one in time
    while time.monotonic() < until and wait(pid, 0) is None:
        if aimed and is_saving(folder):
            time.sleep(draw.uniform(0, 0.006))
            break
        time.sleep(0.0003)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        saving = is_saving(folder)
        os.kill(pid, number)
        code = wait(pid, TIME)
        if code == -number:
            tally.count("by " + signal.Signals(number).name)
            tally.count("while saving", int(saving))
            return True
    return False


def judge(folder: Path, spool: Path) -> str | None:
    """What a kill should not have left."""
    left = sorted(path.name for path in spool.iterdir())
    if left:
        return f"it left {left} in the spool folder"
    if folder.exists() and has_latest(folder):
        try:
            with open_checkpoint(folder):
                pass
        except CheckpointError as error:
            return f"the newest checkpoint is not intact: {error}"
    return None


def chain(name: str, kills: int, place: Path) -> dict[str, Any]:
    """A run that is killed up to `kills` times and then goes to its end; a tally as JSON."""
    tally, draw = Tally(name), random.Random(name)
    spool, runs, answer = place / "spool", place / "runs", place / "answer.json"
    spool.mkdir(parents=True)
    spec = Spec("layers", draw.choice([32, 96]), 3, 4, 8, draw.choice(["", "tied", "frozen"]))
    free = config_for("AdamW", draw.choice(["fp32", "bf16"]), draw.choice([1, 2]), 0.5)
    config = json.loads(json.dumps(free))
    config["patrickstar"] |= {
        "chunk_size": 4000,
        "memory": {
            "host": draw.choice([1 << 19, 1 << 20]) * spec.width // 32,
            "disk": {"path": str(spool)},
        },
    }
    before = time.monotonic()
    expected = train(spec, free, None)
    longest = 3 * (time.monotonic() - before) + 0.3
    for _ in range(kills):
        with child(spec, config, runs, answer) as pid:
            if not kill_one(pid, runs, draw, longest, tally):
                break
        tally.judge(judge(runs, spool))
    why = None
    with child(spec, config, runs, answer) as pid:
        code = wait(pid, TIME)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            why = "it hung after the last kill"
        elif code:
            why = f"it ended with status {code} after the last kill"
    if why is None and json.loads(answer.read_text()) != expected:
        why = "losses or weights are not those of a run that was not killed"
    if why is None:
        tally.count("runs that went to their end afterwards with the same bits")
    else:
        tally.failed(f"{name}, {spec} {config}: {why}")
    shutil.rmtree(place)
    return tally.to_json()


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Kill `count` processes, in chains of which some run beside each other."""
    warm_up(folder)
    tally = Tally("processes killed at random, also while saving; resumed to the same bits")
    draw, number = random.Random(seed), 0
    while tally.tried < count:
        jobs, left = [], count - tally.tried
        while left:  # a chain may come to its end before all of its kills
            number, kills = number + 1, min(left, draw.randint(1, LONGEST_CHAIN))
            name = f"seed {seed}, chain {number}"
            jobs.append((name, _job(name, kills, folder / f"chain{number}")))
            left -= kills
        for name, outcome in run_all(jobs, workers=workers, limit=2 * TIME * LONGEST_CHAIN):
            if outcome.error is not None:
                tally.failed(f"{name}: {outcome.error}")
                continue
            tally.add(outcome.value)
    return [tally]


def _job(name: str, kills: int, place: Path) -> Callable[[Callable[[], None]], Any]:
    return lambda ready: chain(name, kills, place)
