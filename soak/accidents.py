"""What goes wrong in user code and around a run, and what has to hold all the same.

Each accident is a run of its own in a process of its own. After it the run goes on as a user would,
and must reach the losses and weights of a run that had no accident; where numbers themselves are
bad (NaN, infinity), those of an ordinary PyTorch loop.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import patrickstar
from patrickstar.errors import ChunkStateError
from soak.disks import SPEC, STEPS, config, expected, prepare
from soak.tally import Tally
from soak.training import fingerprint, one_step, start
from soak.watched import run_all

LIMIT = 180.0  # seconds

Accident = Callable[[Path, random.Random], str | None]


class FailingOperator(TorchDispatchMode):
    """Raises at operator number `at`."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def goes_on(
    folder: Path, precision: str, accident: Callable[[Any, Any, dict[str, Any], int], bool]
) -> str | None:
    """Train; before each step `accident` may happen. Why the run is not as without.

    An accident says whether a user had to go back to the last checkpoint.
    """
    wanted = expected(precision)
    engine, optimizer = start(SPEC, config(precision, folder / "spool"))
    losses: list[str] = []
    batches = SPEC.batches(STEPS)
    engine.save_checkpoint(folder / "runs", "last")
    while engine.global_steps < STEPS:
        step = engine.global_steps
        if accident(engine, optimizer, batches[step], step):
            engine.load_checkpoint(folder / "runs", "last")
            step = engine.global_steps
        elif engine.global_steps != step:
            return "an accident counted as a step"
        losses = [*losses[:step], one_step(engine, optimizer, batches[step])]
        engine.save_checkpoint(folder / "runs", "last")
    got = {"losses": losses, "weights": fingerprint(engine)}
    engine.close()
    return None if got == wanted else "losses or weights are not those of a run without accidents"


def after(engine: Any, optimizer: Any) -> bool:
    """What a user does after an error; whether the last checkpoint is needed."""
    try:
        optimizer.zero_grad()
        engine.train()
        with torch.no_grad():
            engine(**SPEC.batches(1)[0])
        engine._refuse_when_over()
    except ChunkStateError:
        return True
    return False


def error_in_user_code(folder: Path, draw: random.Random) -> str | None:
    """Memory that runs out, or an error, at a random operator of a forward, backward or step."""

    def accident(engine: Any, optimizer: Any, batch: dict[str, Any], step: int) -> bool:
        error: BaseException = draw.choice(
            [MemoryError("no memory"), RuntimeError("wrong"), KeyboardInterrupt()]
        )
        part = draw.choice(["forward", "backward"])
        mode = FailingOperator(draw.randint(1, 70), error)
        try:
            if part == "forward":
                with mode:
                    loss = engine(**batch)
            else:
                loss = engine(**batch)
                with mode:
                    engine.backward(loss)
        except (MemoryError, RuntimeError, KeyboardInterrupt):
            pass
        return after(engine, optimizer)

    return goes_on(folder, draw.choice(["fp32", "bf16"]), accident)


def interrupt(folder: Path, draw: random.Random) -> str | None:
    """Ctrl-C at a random time of a whole step, which is repeated from the last checkpoint."""

    def accident(engine: Any, optimizer: Any, batch: dict[str, Any], step: int) -> bool:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            # Again and again: one that comes while an object dies is ignored by Python.
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0005, 0.02), 0.1)
            one_step(engine, optimizer, batch)
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
        after(engine, optimizer)
        return True  # the step may be over, or not

    return goes_on(folder, draw.choice(["fp32", "bf16"]), accident)


def clocks(folder: Path, draw: random.Random) -> str | None:
    """Clocks that jump forward and back by years while a run trains and saves."""
    real = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}

    def accident(engine: Any, optimizer: Any, batch: dict[str, Any], step: int) -> bool:
        off = draw.choice([-1e9, 1e9, -1.0, 0.0])
        for name, clock in real.items():
            setattr(time, name, lambda clock=clock: clock() + off)
        if (folder / "runs" / "last").exists():
            os.utime(folder / "runs" / "last", (abs(off), abs(off)))
        return False

    why = goes_on(folder, "bf16", accident)
    for name, clock in real.items():
        setattr(time, name, clock)
    return why


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return SPEC.batches(STEPS)[index]


def forked_workers(folder: Path, draw: random.Random) -> str | None:
    """Data-loader workers that are forked while chunks move."""
    wanted = expected("bf16")
    engine, optimizer = start(SPEC, config("bf16", folder / "spool"))
    losses = []
    for epoch in range(STEPS // 4):
        part = torch.utils.data.Subset(Data(), range(4 * epoch, 4 * epoch + 4))
        loader = torch.utils.data.DataLoader(
            part, batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        losses += [one_step(engine, optimizer, batch) for batch in loader]
    got = {"losses": losses, "weights": fingerprint(engine)}
    engine.close()
    return None if got == wanted else "losses or weights are others with forked workers"


def two_engines(folder: Path, draw: random.Random) -> str | None:
    """Two engines in one process, step by step in a random order."""
    wanted = {"fp32": expected("fp32"), "bf16": expected("bf16")}
    engines = {p: start(SPEC, config(p, folder / "spool")) for p in wanted}
    losses: dict[str, list[str]] = {p: [] for p in wanted}
    for precision in draw.sample([*wanted] * STEPS, 2 * STEPS):
        batch = SPEC.batches(STEPS)[len(losses[precision])]
        losses[precision].append(one_step(*engines[precision], batch))
    for precision, (engine, _) in engines.items():
        got = {"losses": losses[precision], "weights": fingerprint(engine)}
        engine.close()
        if got != wanted[precision]:
            return f"the engine in {precision} has other losses or weights beside another"
    return None


class Bad(nn.Module):
    """Multiplies what comes by a bad number in its forward, or only in its backward."""

    def __init__(self, where: str, number: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.where, self.number, self.calls = where, number, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        bad = self.calls == 3
        if bad and self.where == "inputs":
            x = x * self.number
        x = self.layers(x)
        if bad and self.where == "gradients":
            x.register_hook(lambda gradient: gradient * self.number)
        loss = x.float().square().mean()
        return loss * self.number if bad and self.where == "loss" else loss


def bad_numbers(folder: Path, draw: random.Random) -> str | None:
    """NaN or infinity: as in an ordinary loop in fp32."""
    where = draw.choice(["inputs", "loss", "gradients"])
    number = draw.choice([float("nan"), float("inf"), float("-inf")])
    batches = [torch.randn(4, 32, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    torch.manual_seed(0)
    plain = Bad(where, number)
    steps = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    wanted = []
    for x in batches:
        loss = plain(x)
        loss.backward()
        steps.step()
        steps.zero_grad()
        wanted.append(float(loss.detach()).hex())
    torch.manual_seed(0)
    made = config("fp32", folder / "spool") | {"gradient_clipping": 0.0}
    engine, optimizer = patrickstar.initialize_engine(lambda: Bad(where, number), made)
    got = [one_step(engine, optimizer, {"x": x}) for x in batches]
    weights = engine.state_dict()
    engine.close()
    if got != wanted:
        return f"{number} in {where}: losses {got}, in an ordinary loop {wanted}"
    for name, weight in plain.state_dict().items():
        if not torch.equal(weight.nan_to_num(7.0), weights[name].nan_to_num(7.0)):
            return f"{number} in {where}: {name} is not as in an ordinary loop"
    return None


def nothing_installed(folder: Path, draw: random.Random) -> str | None:
    """A machine without an accelerator and without a compiler: nothing on the path."""
    program = (
        "import sys; from pathlib import Path\n"
        "from soak.disks import *\n"
        "f = Path(sys.argv[1]); want = expected('bf16')\n"
        "e, o = start(SPEC, config('bf16', f / 'spool'))\n"
        "losses = [one_step(e, o, b) for b in SPEC.batches(STEPS)]\n"
        "assert losses == want['losses'] and fingerprint(e) == want['weights']\n"
        "e.save_checkpoint(f / 'runs'); e.load_checkpoint(f / 'runs'); e.close(); print('fine')\n"
    )
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "CC": "", "CXX": ""}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.stdout == "fine\n" else done.stderr[-400:]


ACCIDENTS: dict[str, tuple[Accident, int]] = {
    "errors, no memory and interrupts at random operators": (error_in_user_code, 20),
    "Ctrl-C at random times of a step": (interrupt, 20),
    "clocks that jump": (clocks, 4),
    "data-loader workers that are forked during a run": (forked_workers, 6),
    "two engines in one process": (two_engines, 10),
    "NaN and infinity in inputs, loss and gradients": (bad_numbers, 20),
    "no accelerator, no compiler, an empty path": (nothing_installed, 2),
}


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Try `count` accidents, shared out among the kinds."""
    prepare(folder)
    whole = sum(share for _, share in ACCIDENTS.values())
    tallies = {name: Tally(name) for name in ACCIDENTS}
    jobs = [
        ((name, number), _job(work, f"{seed}/{name}/{number}", folder, number))
        for name, (work, share) in ACCIDENTS.items()
        for number in range(max(1, count * share // whole))
    ]
    for (name, number), outcome in run_all(jobs, workers=workers, limit=LIMIT):
        why = outcome.error or outcome.value
        tallies[name].judge(None if why is None else f"seed {seed}, number {number}: {why}")
    return list(tallies.values())


def _job(
    work: Accident, seed: str, folder: Path, number: int
) -> Callable[[Callable[[], None]], Any]:
    place = folder / f"{work.__name__}{number}"
    return lambda ready: work(place, random.Random(seed))
