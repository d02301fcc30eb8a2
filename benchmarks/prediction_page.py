"""The table of plans against runs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table
from benchmarks.parts import NOT_MEASURED, measured_when

PEAK_TARGET = 0.05
STEP_TARGET = 0.15
_HEADS = ("", "plan says", "run", "peak, MiB: plan / run", "step, s: plan / run", "error", "bound")
Result = dict[str, Any]


def step_of(case: Result) -> float:
    """Seconds: the median step of the run after its warm-up."""
    return float(statistics.median(case["run"]["step_s"][case["job"]["warmup"] :]))


def step_error(case: Result) -> float:
    """Of the predicted step, relative to the real one; negative where the run is slower."""
    return float(case["plan"]["step"]["total"] / step_of(case) - 1)


def peaks(case: Result) -> dict[str, tuple[int, int]]:
    """What is predicted and what was seen: the peaks of memory, and of a disk use and file."""
    notes, found = case["run"]["notes"], {}
    for name, tier in case["plan"]["tiers"].items():
        seen = notes["tier_peak_later" if name == "disk" else "tier_peak"][name]
        if seen:
            found[name] = (tier["peak"], seen)
        if notes["tier_reserved"][name]:
            found[f"{name}'s file"] = (tier["reserved"], notes["tier_reserved"][name])
    return found


def peak_errors(case: Result) -> dict[str, float]:
    """Of every predicted peak, relative to the real one."""
    return {name: said / seen - 1 for name, (said, seen) in peaks(case).items()}


def verdict_is_wrong(case: Result) -> bool:
    """Whether the plan said that it fits and the run was refused, or the other way round."""
    return bool(case["plan"]["fits"]) == (case["run"]["refused"] is not None)


def prediction(result: Result) -> Iterator[str]:
    """Every case, and the largest errors."""
    rows, cases = [], []
    for part in result["parts"]:
        case = part.get("answer")
        if case is None:
            rows.append([part["arguments"][-1], NOT_MEASURED, part["not_measured"]])
            rows[-1] += [""] * (len(_HEADS) - len(rows[-1]))
            continue
        cases.append(case)
        rows.append([_name(case), *_cells(case)])
    yield from table(_HEADS, rows)
    yield ""
    ran = [case for case in cases if case["plan"]["fits"] and not case["run"]["refused"]]
    if ran:
        peak = max(abs(error) for case in ran for error in peak_errors(case).values())
        steps = [abs(step_error(case)) for case in ran]
        within = sum(error <= STEP_TARGET for error in steps)
        yield (
            f"Largest error of a tier's peak: {peak:.1%} (the aim is {PEAK_TARGET:.0%}). Error of "
            f"a step: {statistics.median(steps):.0%} in the median and {max(steps):.0%} at most, "
            f"within {STEP_TARGET:.0%} for {within} of {len(steps)}. Wrong verdicts: "
            f"{sum(map(verdict_is_wrong, cases))} of {len(cases)}."
        )
    yield ""
    yield from measured_when(result)


def _name(case: Result) -> str:
    job = case["job"]
    memory = [f"{tier} {size}" for tier, size in job["options"]["memory"].items()]
    parts = [job["model"], job["options"]["precision"], *(memory or ["no budget"])]
    parts += ["disk"] if job["options"]["disk"] else []
    parts += ["recomputed"] if job["changes"] else []
    return f"{', '.join(parts)}, {job['sequences']} x {job['length']}"


def _cells(case: Result) -> list[str]:
    says = "fits" if case["plan"]["fits"] else "does not fit"
    refused = case["run"]["refused"] is not None
    ran = "refused" if refused else "runs"
    if refused or not case["plan"]["fits"]:
        return [says, ran, "", "", "", ""]
    held = [f"{name} {m / 2**20:.0f} / {n / 2**20:.0f}" for name, (m, n) in peaks(case).items()]
    step = case["plan"]["step"]
    seconds = f"{step['total']:.3f} / {step_of(case):.3f}"
    return [says, ran, ", ".join(held), seconds, f"{step_error(case):+.0%}", step["bottleneck"]]
