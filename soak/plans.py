"""The verdict of a plan is never wrong: random models under random budgets, planned and then run.

What is said to fit runs in the budgets that were asked about. What is said not to fit runs in the
smallest ones that the plan names instead. A run that is refused names the budget that the plan
names: both ask one function, `patrickstar.engine.needs`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patrickstar.config import load_config
from patrickstar.engine.from_config import settings_from
from patrickstar.planning import Prediction, predict, rehearse_run
from soak.budgets import TIME, draw_trial, run
from soak.models import Spec
from soak.tally import Tally
from soak.training import warm_up
from soak.watched import run_all

MOST_NAMED = 3  # times that a plan may name budgets: one tier may come to need more beside another


def planned(spec: Spec, config: dict[str, Any]) -> Prediction:
    """What the plan says; nothing is allocated or timed."""
    settings = settings_from(load_config(json.loads(json.dumps(config))))
    (batch,) = spec.batches(1)
    shapes = {name: torch.empty_like(value, device="meta") for name, value in batch.items()}
    return predict(rehearse_run(spec.build, ((), shapes), settings), settings, None, None)


def plan_then_run(spec: Spec, config: dict[str, Any]) -> dict[str, Any]:
    """Plan, take the budgets that are named if it does not fit, and run.

    Returns:
        `wrong`: why the verdict was wrong, None if it was right; `fits`: what it was first;
        `named`: budgets that were; `same`: whether a run with the budgets that were asked about is
        refused naming those of the plan, None where it is not refused at its first batch.
    """
    asked = json.loads(json.dumps(config))
    memory = config["patrickstar"]["memory"]
    named: dict[str, int] = {}
    first = found = planned(spec, config)
    for _ in range(MOST_NAMED):
        if found.fits:
            break
        lacking = {name: tier.smallest for name, tier in found.tiers.items() if not tier.fits}
        named |= lacking
        memory |= lacking
        found = planned(spec, config)
    answer: dict[str, Any] = {"wrong": None, "fits": first.fits, "named": named, "same": None}
    if not found.fits:
        answer["wrong"] = f"the named budgets {named} do not fit by the plan itself"
        return answer
    outcome = run(spec, config, lambda: None)
    if "refused" in outcome:
        answer["wrong"] = f"said to fit {memory}, refused: {outcome['refused']['message']}"
        return answer
    for name, tier in found.tiers.items():
        budget = None if name == "disk" else memory.get(name)
        if budget is not None and outcome["peak"][name] > budget:
            answer["wrong"] = f"the {name} held {outcome['peak'][name]}, more than {tier.budget}"
    if not first.fits and answer["wrong"] is None:
        refused = run(spec, asked, lambda: None).get("refused")
        if refused is not None and refused["made"]:
            answer["same"] = refused["smallest"] == named.get(refused["tier"])
    return answer


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Plan and run `count` combinations, but for those whose path depends on their data."""
    tally = Tally("random models and budgets, planned and run: the verdict is right")
    warm_up(folder)
    trials = {n: draw_trial(n, seed, folder) for n in range(count)}
    trials = {
        n: trial
        for n, trial in trials.items()
        if trial.spec.kind != "experts" and "piece_size" not in trial.free["patrickstar"]
    }
    hows = {n: trial.how() for n, trial in trials.items()}
    jobs = [(n, _job(t.spec, t.config)) for n, t in trials.items()]
    for number, outcome in run_all(jobs, workers=workers, limit=TIME):
        value = outcome.value or {}
        why = outcome.error or value.get("wrong")
        tally.judge(None if why is None else f"{hows[number]}: {why}")
        if outcome.error is None:
            tally.count("said to fit" if value["fits"] else "said not to fit")
            if value["same"] is not None:
                how = "the budget of the plan" if value["same"] else "another"
                tally.count(f"refused at the first batch, naming {how}")
    return [tally]


def _job(spec: Spec, config: dict[str, Any]) -> Callable[[Callable[[], None]], Any]:
    def work(ready: Callable[[], None]) -> dict[str, Any]:
        ready()
        return plan_then_run(spec, config)

    return work
