"""The verdict of a plan is never wrong: random models under random budgets, planned and then run.

What is said to fit runs in the budgets that were asked about. What is said not to fit runs in the
smallest ones that the plan names instead. A run that is refused names the budget that the plan
names: both ask one function, `patrickstar.engine.needs`. The same for budgets on the disk; several
ranks are in `planned_ranks`.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from patrickstar.errors import SpoolError
from patrickstar.planning import Prediction, predict
from soak.budgets import TIME, Trial, draw_trial, run
from soak.models import Spec
from soak.planned_ranks import soak_ranks
from soak.rehearsed import rehearsed
from soak.tally import Tally
from soak.training import warm_up
from soak.watched import all_of, run_all

MOST_NAMED = 3  # times that a plan may name budgets: one tier may come to need more beside another


def planned(spec: Spec, config: dict[str, Any]) -> Prediction:
    """What the plan says; nothing is allocated or timed."""
    found, settings = rehearsed(spec, config)
    return predict(found, settings, None, None)


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
        for name, budget in lacking.items():
            memory[name] = budget if name != "disk" else memory["disk"] | {"size": budget}
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
        budget = memory.get("disk", {}).get("size") if name == "disk" else memory.get(name)
        if budget is not None and outcome["peak"][name] > budget:
            answer["wrong"] = f"the {name} held {outcome['peak'][name]}, more than {tier.budget}"
    if not first.fits and answer["wrong"] is None:
        try:
            refused = run(spec, asked, lambda: None).get("refused")
        except SpoolError:  # the disk's budget does not hold what memory cannot
            refused = None
        if refused is not None and refused["made"]:
            answer["same"] = refused["smallest"] == named.get(refused["tier"])
    return answer


def soak(count: int, seed: int, folder: Path, workers: int) -> list[Tally]:
    """Plan and run `count` combinations, but for those whose path depends on their data."""
    warm_up(folder)
    everything = (draw_trial(n, seed, folder) for n in range(count))
    trials = [trial for trial in everything if trial.spec.kind != "experts"]
    limited = [
        _with_disk_budget(t, seed) for t in trials if "disk" in t.config["patrickstar"]["memory"]
    ]
    pieces = [trial for trial in trials if "piece_size" in trial.free["patrickstar"]]
    whole = [trial for trial in trials if "piece_size" not in trial.free["patrickstar"]]
    right = "planned and run: the verdict is right"
    return [
        _judged(Tally(f"random models and budgets, {right}"), whole, workers),
        _judged(Tally(f"random models with parameters in pieces, {right}"), pieces, workers),
        _judged(Tally(f"random models and budgets on the disk, {right}"), limited, workers),
        soak_ranks(max(1, count // 4), seed, folder),
    ]


def _with_disk_budget(trial: Trial, seed: int) -> Trial:
    """The same trial with a budget on the disk, about as large as what memory cannot hold."""
    memory = trial.config["patrickstar"]["memory"]
    numel = sum(p.numel() for p in trial.spec.build().parameters())
    above = memory["host"] + memory.get("device", 0)
    share = random.Random(f"disk/{seed}/{trial.number}").uniform(0.5, 1.5)
    config = json.loads(json.dumps(trial.config))
    size = int(max(16 * numel - above, numel) * share)
    config["patrickstar"]["memory"]["disk"]["size"] = size
    return dataclasses.replace(trial, config=config)


def _judged(tally: Tally, trials: list[Trial], workers: int) -> Tally:
    hows = {trial.number: trial.how() for trial in trials}
    jobs = [(t.number, all_of(plan_then_run, t.spec, t.config)) for t in trials]
    for number, outcome in run_all(jobs, workers=workers, limit=TIME):
        value = outcome.value or {}
        why = outcome.error or value.get("wrong")
        tally.judge(None if why is None else f"{hows[number]}: {why}")
        if outcome.error is None:
            tally.count("said to fit" if value["fits"] else "said not to fit")
            if value["same"] is not None:
                how = "the budget of the plan" if value["same"] else "another"
                tally.count(f"refused at the first batch, naming {how}")
    return tally
