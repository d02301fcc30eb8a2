"""Budgets are promises: random models under random budgets, chunk sizes, policies and precisions.

A run must either be refused before its first update, with a smallest budget that works when it is
given, or finish inside its budgets with the losses and weights of the same run in unlimited memory.
Every run is a process of its own, whose memory is watched from outside.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patrickstar.errors import BudgetError
from soak.models import Spec, draw_spec
from soak.tally import Tally
from soak.training import (
    OPTIMIZERS,
    config_for,
    fingerprint,
    one_step,
    start,
    update_in_backward,
    warm_up,
)
from soak.watched import Outcome, run_all

STEPS = 4
# Bytes: 176 MiB of free pages that the C library's heap may keep, and Python's own objects.
SLACK = (176 << 20) + (24 << 20)
TIME = 600.0  # seconds; one that hangs takes for ever, and a machine may be busy otherwise
MOST_REFUSALS = 15
MOST_WHILE_MADE = 3


@dataclasses.dataclass
class Trial:
    """One run that is to be tried.

    Attributes:
        config: with budgets.
        free: the same without.
    """

    number: int
    spec: Spec
    config: dict[str, Any]
    free: dict[str, Any]
    asked: dict[str, int]

    def how(self) -> str:
        ours = {k: v for k, v in self.config["patrickstar"].items() if k != "device"}
        rest = {k: v for k, v in self.config.items() if k != "patrickstar"}
        return f"{self.spec} {json.dumps(ours)} {json.dumps(rest)}"


def draw_trial(number: int, seed: int, spool: Path) -> Trial:
    """Trial `number` of the runs of `seed`; the same for the same numbers."""
    draw = random.Random(f"{seed}/{number}")
    large = draw.random() < 0.1
    spec = draw_spec(draw, large=large)
    free = config_for(
        draw.choice(sorted(OPTIMIZERS)),
        draw.choice(["fp32", "bf16", "fp16"]),
        draw.choice([1, 1, 2, 3]),
        draw.choice([0.0, 0.5]),
    )
    numel = sum(p.numel() for p in spec.build().parameters())
    if draw.random() < 0.2 and not large:
        free["patrickstar"]["piece_size"] = draw.choice([4096, 20_000, numel])
    config = json.loads(json.dumps(free))
    ours = config["patrickstar"]
    ours["chunk_size"] = draw.choice(["auto", 1, 1000, numel // 7 + 1, numel // 3 + 1, numel])
    ours["policy"] = draw.choice(["planned", "planned", "lru", "fifo"])
    ours["prefetch"], ours["overlap_update"] = draw.random() < 0.7, draw.random() < 0.7
    total = 16 * numel
    memory: dict[str, Any] = {"host": int(total * draw.uniform(0.05, 1.3)) + (64 << 10)}
    if draw.random() < 0.85:
        memory["disk"] = {"path": str(spool)}
    if draw.random() < 0.4:
        memory["device"] = int(total * draw.uniform(0.05, 0.8)) + (64 << 10)
        ours["update"] = draw.choice(["host", "device"])
    ours["memory"] = memory
    if draw.random() < 0.5:
        update_in_backward(config, free)
    asked = {tier: memory[tier] for tier in ("device", "host") if tier in memory}
    return Trial(number, spec, config, free, asked)


def run(spec: Spec, config: dict[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Train; what came of it, or how it was refused."""
    micro = STEPS * int(config["gradient_accumulation_steps"])
    batches = spec.batches(micro)
    ready()
    engine: Any = None
    try:
        engine, optimizer = start(spec, config)
        losses = [one_step(engine, optimizer, batch) for batch in batches]
        report = engine.memory_report()
        result = {
            "losses": losses,
            "weights": fingerprint(engine),
            "peak": {name: usage.peak for name, usage in report.tiers.items()},
        }
        engine.close()
        return result
    except BudgetError as error:
        return {
            "refused": {
                "tier": error.tier,
                "budget": error.budget,
                "smallest": error.smallest,
                "after": 0 if engine is None else engine.global_steps + int(optimizer.torn),
                "made": engine is not None,
                "message": str(error)[:400],
            }
        }


def judge(trial: Trial, outcome: Outcome, expected: Outcome, tally: Tally) -> str | None:
    """Why a run that was not refused is not what was promised."""
    if expected.error is not None:
        return f"without a budget: {expected.error}"
    if outcome.error is not None:
        return outcome.error
    if outcome.value["losses"] != expected.value["losses"]:
        return f"losses {outcome.value['losses']}, unlimited {expected.value['losses']}"
    if outcome.value["weights"] != expected.value["weights"]:
        return "the weights are not those of unlimited memory"
    memory = trial.config["patrickstar"]["memory"]
    budget = memory["host"] + memory.get("device", 0)
    for tier in ("host", "device"):
        if outcome.value["peak"].get(tier, 0) > memory.get(tier, 1 << 62):
            return f"the books say {outcome.value['peak']}, more than {memory}"
    over = outcome.peak - budget
    tally.most("most bytes of a process beyond its budgets", over)
    if trial.spec.kind == "experts" and trial.free.keys() & {"bf16", "fp16"}:
        # oneDNN keeps generated code for each number of rows that it meets, some MiB each; an
        # ordinary loop grows in the same way.
        tally.count("not judged by the memory of the process")
    elif over > SLACK:
        return f"{over} bytes beyond its budgets of {budget} were resident"
    return None


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Try `count` combinations."""
    tally = Tally("random models, budgets, chunk sizes, policies and precisions")
    warm_up(folder)
    trials = {n: draw_trial(n, seed, folder) for n in range(count)}
    jobs = [(n, _job(t.spec, t.free)) for n, t in trials.items()]
    expected = dict(run_all(jobs, workers=workers, limit=TIME))
    waiting: dict[int, Trial] = dict(trials)
    refusals: dict[int, list[tuple[str, bool]]] = {number: [] for number in trials}
    while waiting:
        jobs = [(n, _job(t.spec, t.config)) for n, t in waiting.items()]
        waiting = {}
        for number, outcome in run_all(jobs, workers=workers, limit=TIME):
            trial = trials[number]
            refused = (outcome.value or {}).get("refused")
            if refused is None:
                if refusals[number]:
                    tally.count("refused, and the budget that was named works")
                why = judge(trial, outcome, expected[number], tally)
                tally.judge(None if why is None else f"{trial.how()}: {why}")
                continue
            why = _refuse(trial, refused, refusals[number])
            if why is not None:
                tally.failed(f"{trial.how()}: {why}")
                continue
            refusals[number].append((refused["tier"], refused["made"]))
            trial.config["patrickstar"]["memory"][refused["tier"]] = refused["smallest"]
            waiting[number] = trial
    return [tally]


def _refuse(trial: Trial, refused: dict[str, Any], before: list[tuple[str, bool]]) -> str | None:
    """Why this refusal is not as promised.

    A budget is refused at the first batch at most once, and before that while the engine is made:
    to build the model, to move it into its layout, for the updates.
    """
    if refused["after"]:
        return f"refused after {refused['after']} steps: {refused['message']}"
    unknown = trial.spec.kind == "experts" or "piece_size" in trial.free["patrickstar"]
    if unknown and len(before) < MOST_REFUSALS:
        return None  # its path depends on the data, or on the rows that are looked up
    earlier = before.count((refused["tier"], refused["made"]))
    if (refused["tier"], True) in before or earlier >= MOST_WHILE_MADE:
        return f"the {refused['tier']} budget that was named does not work: {refused['message']}"
    return None


def _job(spec: Spec, config: dict[str, Any]) -> Callable[[Callable[[], None]], Any]:
    return lambda ready: run(spec, config, ready)
