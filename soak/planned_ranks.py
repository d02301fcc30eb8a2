"""What a plan says of two ranks is right where it says something.

Whether budgets hold on several ranks is said only where it is sure, see
`patrickstar.planning.parallel`. Two processes then train for real: what fits must run inside its
budgets on both, and what does not must be refused. Where nothing is said, both may happen.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from patrickstar.machine import machine_from
from patrickstar.planning import data_parallel, predict
from soak.budgets import TIME, run
from soak.models import Spec, draw_spec
from soak.rehearsed import rehearsed
from soak.tally import Tally
from soak.training import config_for
from soak.watched import all_of, run_all

RANKS = 2


def draw_ranks(number: int, seed: int, folder: Path) -> tuple[Spec, dict[str, Any]]:
    """Trial `number`: a model, and a config with a ZeRO stage and budgets."""
    draw = random.Random(f"two ranks/{seed}/{number}")
    spec = draw_spec(draw)
    while spec.kind == "experts":  # its path depends on its data, which no plan knows
        spec = draw_spec(draw)
    optimizer, precision = draw.choice(["AdamW", "SGD", "Lion"]), draw.choice(["fp32", "bf16"])
    config = config_for(optimizer, precision, draw.choice([1, 1, 2]), draw.choice([0.0, 0.5]))
    config["zero_optimization"] = {"stage": draw.choice([1, 1, 3, 3, 0, 2])}
    numel = sum(p.numel() for p in spec.build().parameters())
    # Half of the budgets are where the verdict is sure: far too small, or more than enough.
    share = draw.choice([draw.uniform(0.02, 1.3), draw.uniform(0.02, 0.3), draw.uniform(2.0, 4.0)])
    memory: dict[str, Any] = {"host": int(16 * numel * share) + (64 << 10)}
    if share >= 2.0:
        memory["host"] += 16 << 20
    if draw.random() < 0.4:
        memory["disk"] = {"path": str(folder)}
    config["patrickstar"] |= {
        "memory": memory,
        "chunk_size": draw.choice(["auto", 1, 1000, numel // 3 + 1]),
        "policy": draw.choice(["planned", "lru"]),
    }
    return spec, config


def said(spec: Spec, config: dict[str, Any]) -> bool | None:
    """The verdict of the plan for `RANKS` ranks."""
    run_, settings = rehearsed(spec, config)
    found = predict(run_, settings, None, None)
    machine = machine_from("server-8x80gb")
    stages = data_parallel(run_, settings, machine, found, RANKS).stages
    return stages[config["zero_optimization"]["stage"]].fits


def plan_then_run_ranks(spec: Spec, config: dict[str, Any]) -> dict[str, Any]:
    """Plan, and run both ranks whatever the plan said.

    Returns:
        `wrong`: why the verdict was wrong, None if it was right or none was given; `said`: what it
        was; `ran`: whether both ranks trained.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs: list[tuple[Any, Any]] = [("plan", all_of(said, spec, config))]
        jobs += [(rank, _rank(spec, config, rank, f"{folder}/store")) for rank in range(RANKS)]
        found = dict(run_all(jobs, workers=len(jobs), limit=TIME))
    errors = [f"{who}: {o.error}" for who, o in found.items() if o.error is not None]
    answer: dict[str, Any] = {"wrong": "; ".join(errors) or None, "said": None, "ran": None}
    if errors:
        return answer
    fits, outcomes = found["plan"].value, [found[rank].value for rank in range(RANKS)]
    refused = [o["refused"]["message"] for o in outcomes if "refused" in o]
    answer |= {"said": fits, "ran": not refused}
    budget = config["patrickstar"]["memory"]["host"]
    held = [o["peak"]["host"] for o in outcomes if "peak" in o]
    if any(peak > budget for peak in held):
        answer["wrong"] = f"{held} bytes were held, more than {budget}"
    elif fits and refused:
        answer["wrong"] = f"said to fit, refused: {refused[0]}"
    elif fits is False and not refused:
        answer["wrong"] = "said not to fit, and it ran"
    return answer


def soak_ranks(count: int, seed: int, folder: Path) -> Tally:
    """Plan and run `count` combinations, each on two ranks at once."""
    tally = Tally("random models, budgets and stages on two ranks: what is said is right")
    trials = {n: draw_ranks(n, seed, folder) for n in range(count)}
    jobs = [(n, all_of(plan_then_run_ranks, *trial)) for n, trial in trials.items()]
    for number, outcome in run_all(jobs, workers=1, limit=2 * TIME):
        value = outcome.value or {}
        why = outcome.error or value.get("wrong")
        spec, config = trials[number]
        tally.judge(None if why is None else f"{spec} {json.dumps(config)}: {why}")
        if why is None:
            verdict = {True: "said to fit", False: "said not to fit", None: "not known"}
            tally.count(f"{verdict[value['said']]}, {'ran' if value['ran'] else 'refused'}")
    return tally


def _rank(
    spec: Spec, config: dict[str, Any], rank: int, store: str
) -> Callable[[Callable[[], None]], Any]:
    def work(ready: Callable[[], None]) -> dict[str, Any]:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        return run(spec, config, ready)

    return work
