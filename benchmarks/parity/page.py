"""The table of parity on the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table

NO_NUMBER = "refused"


def parity(result: dict[str, Any]) -> Iterator[str]:
    """Differences of losses, the fp16 run, and the memory of a larger one."""
    for part in result["parts"]:
        if part["not_measured"]:
            yield f"not measured ({part['not_measured']})"
        else:
            yield from _answer(part["answer"])


def _answer(answer: dict[str, Any]) -> Iterator[str]:
    rows = answer["rows"]
    keys = list(next(iter(rows.values()))["compared"])
    reference = rows[answer["reference"]]["name"]
    yield (
        f"Largest relative difference of a loss from that of {reference} with `torch_adam`, over "
        f"{answer['steps']} steps. Drift is the mean signed difference over the last quarter of "
        "the bf16 steps, that of the model where it is largest."
    )
    yield ""
    head = ("", *(f"{p} {m}" for m, p in (key.split() for key in keys)), "bf16 drift", "moved")
    yield from table(
        head, [[row["name"], *_cells(key, row, keys, answer)] for key, row in rows.items()]
    )
    yield ""
    yield "Moved: MiB between tiers a step, Llama in fp32."
    yield ""
    yield from _half(answer["fp16"])
    yield ""
    yield from _memory(answer["memory"])
    yield ""
    for row in rows.values():
        if row["options"]:
            yield f"- {row['name']}: `{json.dumps(row['options'])}`"
        reasons = {why for why in row["compared"].values() if isinstance(why, str)}
        for why in sorted(reasons):
            yield f"- {row['name']}, {NO_NUMBER}: {why}"
    yield f"- versions: deepspeed {answer['deepspeed']}, torch {answer['torch']}"


def _cells(key: str, row: dict[str, Any], keys: list[str], answer: dict[str, Any]) -> list[str]:
    found = row["compared"]
    drifts = [
        abs(found[k]["drift"]) for k in keys if k.endswith("bf16") and isinstance(found[k], dict)
    ]
    llama = found["Llama fp32"]
    moved = llama["moved"] if isinstance(llama, dict) else 0
    if key == answer["reference"]:
        return ["—"] * (len(keys) + 2)
    return [
        *(f"{found[k]['largest']:.1e}" if isinstance(found[k], dict) else NO_NUMBER for k in keys),
        f"{max(drifts):.1e}" if drifts else NO_NUMBER,
        f"{moved / 2**20:.2f}" if moved else "",
    ]


def _half(found: dict[str, Any]) -> Iterator[str]:
    if "error" in found:
        yield f"**fp16**: not measured ({found['error']})"
        return
    same = {True: "the same", False: "**not the same**"}
    yield (
        f"**fp16** (GPT, host 3 MiB + disk), beside a plain loop whose loss scale DeepSpeed's own "
        f"`DynamicLossScaler` decides, since DeepSpeed refuses fp16 on a CPU: over "
        f"{found['steps']} steps with {found['skipped']} overflows and {found['grown']} growths of "
        f"the scale, {same[found['same_scales']]} scales and {same[found['same_skips']]} skipped "
        f"steps; the losses differ by at most {found['largest']:.1e}."
    )


def _memory(memory: dict[str, Any]) -> Iterator[str]:
    yield f"**Memory** of {memory['model']} in bf16 with fp32 gradients: peak above the libraries."
    yield ""
    rows = memory["rows"]
    first = next(iter(rows.values()))
    cells = []
    for row in rows.values():
        if row["error"]:
            cells.append([row["name"], f"not measured ({row['error']})", ""])
            continue
        same = "same bits" if row["losses"] == first["losses"] else "differ"
        same = "—" if row is first else same
        cells.append([row["name"], f"{row['peak'] / 2**20:.0f}", same])
    yield from table(("", "peak, MiB", "losses"), cells)
