"""Disks that are full or fail, under the spool and under checkpoints.

Two ways to be full: a small file system of its own (tmpfs, where this user may mount one), or a
limit on the size of files (`RLIMIT_FSIZE`). And one way to fail: the system calls on files answer
with an error at some call, once or from then on. Whatever comes, it must be a `SpoolError` or a
`CheckpointError`; the checkpoints from before must be intact; and a run that goes on, or resumes
from the last of them, must reach the losses and weights of one that met no fault.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patrickstar.checkpoint import has_latest, open_checkpoint
from patrickstar.errors import BudgetError, CheckpointError, ChunkStateError, SpoolError
from soak.models import Spec
from soak.tally import Tally
from soak.training import config_for, fingerprint, one_step, start, warm_up
from soak.watched import run_all

SPEC = Spec("layers", 64, 4, 4, 8)
STEPS = 8
LIMIT = 120.0  # seconds
CALLS = ("pwritev", "preadv", "pwrite", "pread", "fsync", "rename", "replace", "posix_fallocate")
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def config(precision: str, spool: Path | None) -> dict[str, Any]:
    made = config_for("AdamW", precision, 1, 0.5)
    if spool is not None:
        disk = {"path": str(spool), "verify": True}
        made["patrickstar"] |= {"memory": {"host": 1 << 20, "disk": disk}, "chunk_size": 9000}
    return made


@functools.cache  # it is the same for every trial, and children inherit it
def expected(precision: str) -> dict[str, Any]:
    """The run without a fault and without a budget."""
    engine, optimizer = start(SPEC, config(precision, None))
    losses = [one_step(engine, optimizer, batch) for batch in SPEC.batches(STEPS)]
    result = {"losses": losses, "weights": fingerprint(engine)}
    engine.close()
    return result


def saving_run(
    precision: str, spool: Path, runs: Path, draw: random.Random, tally_errors: list[str]
) -> dict[str, Any]:
    """Train and save after every step; after an error go on, or from the last checkpoint."""
    engine, optimizer, losses = None, None, []
    for _ in range(40):
        try:
            if engine is None:
                engine, optimizer = start(SPEC, config(precision, spool))
                losses = []
                if has_latest(runs):
                    losses = engine.load_checkpoint(runs)[1]["losses"]
            while engine.global_steps < STEPS:
                batch = SPEC.batches(STEPS)[engine.global_steps]
                losses = [*losses[: engine.global_steps], one_step(engine, optimizer, batch)]
                later = draw.random() < 0.5
                engine.save_checkpoint(
                    runs, client_state={"losses": losses}, keep=2, asynchronous=later
                )
            engine.wait_for_checkpoint()
            result = {"losses": losses, "weights": fingerprint(engine)}
            engine.close()
            return result
        except CheckpointError as error:
            tally_errors.append(f"CheckpointError: {error}")
        except (SpoolError, ChunkStateError) as error:
            tally_errors.append(f"{type(error).__name__}: {error}")
            with contextlib.suppress(SpoolError, CheckpointError, ChunkStateError):
                if engine is not None:
                    engine.close()
            engine = None
    raise AssertionError(f"no end: {tally_errors[-3:]}")


def judge(got: dict[str, Any], wanted: dict[str, Any], spool: Path, runs: Path) -> str | None:
    if got != wanted:
        return "losses or weights are not those of a run without a fault"
    left = [path.name for path in spool.iterdir()] if spool.exists() else []
    if left:
        return f"{left} was left in the spool folder"
    for path in runs.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            with open_checkpoint(runs, path.name):
                pass
    return None


class SickFiles:
    """The system's calls on files, of which some fail.

    Args:
        first: the number of the call that fails first.
        times: how many fail from then on.
        short: answer with fewer bytes instead of an error.
    """

    def __init__(self, call: str, first: int, times: int, code: int, short: bool) -> None:
        self.call, self.first, self.last = call, first, first + times
        self.code, self.short, self.seen = code, short, 0
        self.real = getattr(os, call)
        self.failed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        file = args[0] if args and isinstance(args[0], int) else -1
        if file >= 0 and os.readlink(f"/proc/self/fd/{file}").startswith("/proc/"):
            return self.real(*args, **kwargs)  # no disk
        self.seen += 1
        if self.first <= self.seen < self.last:
            self.failed += 1
            if self.short:
                return 0
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **kwargs)


def sick_run(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """A run whose files fail at some calls."""
    draw = random.Random(f"{seed}/{number}")
    precision = draw.choice(["fp32", "bf16"])
    call = draw.choice([c for c in CALLS if hasattr(os, c)])
    short = call in ("pwritev", "preadv") and draw.random() < 0.2
    files = SickFiles(call, draw.randint(1, 60), draw.choice([1, 1, 3]), draw.choice(CODES), short)
    spool, runs = folder / f"spool{number}", folder / f"runs{number}"
    wanted, errors = expected(precision), []
    setattr(os, call, files)
    try:
        got = saving_run(precision, spool, runs, draw, errors)
    finally:
        setattr(os, call, files.real)
    why = judge(got, wanted, spool, runs)
    how = f"{call} number {files.first} to {files.last - 1}: {os.strerror(files.code)}, {short=}"
    shutil.rmtree(runs, ignore_errors=True)
    return {"how": how, "why": why, "errors": len(errors), "injected": files.failed}


@contextlib.contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[str]:
    """`folder` on a small disk; how it is small."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=0700", "none", str(folder)]
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = mounted and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if mounted:
        try:
            yield "tmpfs"
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes // 8, hard))
    try:
        yield "RLIMIT_FSIZE"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_run(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """A run on a disk that gets full."""
    draw = random.Random(f"full {seed}/{number}")
    precision = draw.choice(["fp32", "bf16"])
    wanted, errors = expected(precision), []
    place = folder / f"small{number}"
    with small_disk(place, draw.randint(1 << 20, 12 << 20)) as kind:
        spool, runs = place / "spool", place / "runs"
        why = None
        try:
            engine, optimizer = start(SPEC, config(precision, spool))
        except SpoolError as error:
            return {"how": kind, "why": None, "errors": 1, "injected": 1, "told": str(error)}
        for step, batch in enumerate(SPEC.batches(STEPS)):
            try:
                loss = one_step(engine, optimizer, batch)
            except BudgetError as error:
                if engine.global_steps or error.tier != "disk":
                    raise
                engine.close()
                return {"how": kind, "why": None, "errors": 1, "injected": 1, "told": str(error)}
            if loss != wanted["losses"][step]:
                why = f"the loss of step {step} is another"
            if step == 2 and kind == "tmpfs":  # somebody else fills the disk
                with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
                    for _ in range(1 << 12):
                        filler.write(bytes(4096))
            try:
                engine.save_checkpoint(runs, keep=1, asynchronous=draw.random() < 0.5)
                engine.wait_for_checkpoint()
            except CheckpointError as error:
                errors.append(str(error))
        if fingerprint(engine) != wanted["weights"]:
            why = "the weights are others"
        engine.close()
        for path in runs.iterdir() if runs.exists() else []:
            if path.is_dir() and path.name.startswith("."):
                why = f"{path.name} was left"
            elif path.is_dir():
                with open_checkpoint(runs, path.name):
                    pass
    return {"how": kind, "why": why, "errors": len(errors), "injected": len(errors)}


def prepare(folder: Path) -> None:
    """What every trial needs, made before the first fork."""
    warm_up(folder / "warm")
    for precision in ("fp32", "bf16"):
        expected(precision)


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Try `count` failing disks and half as many full ones."""
    prepare(folder)
    sick = Tally("files that fail or are short, under the spool and checkpoints")
    full = Tally("full disks, under the spool and checkpoints")
    jobs = [((sick, n), _job(sick_run, n, seed, folder)) for n in range(count)]
    jobs += [((full, n), _job(full_run, n, seed, folder)) for n in range(count // 2)]
    for (tally, number), outcome in run_all(jobs, workers=workers, limit=LIMIT):
        value = outcome.value or {"how": f"number {number}", "why": outcome.error, "errors": 0}
        tally.judge(None if value["why"] is None else f"{value['how']}: {value['why']}")
        tally.count("calls that failed", value.get("injected", 0))
        tally.count("errors told to the user", value["errors"])
        if tally is full:
            tally.count(value["how"])
    return [sick, full]


def _job(
    run: Callable[[int, int, Path], dict[str, Any]], number: int, seed: int, folder: Path
) -> Callable[[Callable[[], None]], Any]:
    return lambda ready: run(number, seed, folder)
