"""Write the tables of docs/benchmarks.md from benchmarks/results: `python benchmarks/render.py`.

The page holds prose and, between `<!-- table NAME -->` and `<!-- end NAME -->`, what this program
puts there. `--check` changes nothing and fails if the page is not what it would write.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.capacity_page import capacity  # noqa: E402
from benchmarks.limit import Ideal, Rates, ideal, in_memory  # noqa: E402
from benchmarks.markdown import table  # noqa: E402
from benchmarks.network_page import FIGURE, figure, network  # noqa: E402
from benchmarks.parity.page import parity  # noqa: E402
from benchmarks.parts import NOT_MEASURED, measured_when, parts_of  # noqa: E402
from benchmarks.prediction_page import prediction  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
Result = dict[str, Any]


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f}"


def machine_rates(result: Result) -> Rates:
    """The best that the machine did in this run, before or after the rows."""
    facts = result["machine"]
    return Rates(
        gemm=max(f["gemm_flops"] for f in facts),
        copy=max(f["copy_bytes_per_s"] for f in facts),
        read=max(f["disk"]["read"] for f in facts),
        write=max(f["disk"]["write"] for f in facts),
    )


def median_step(result: Result, run: Result) -> float:
    """Seconds: the median step after warm-up."""
    return float(statistics.median(run["step_s"][result["warmup"] :]))


def best_run(result: Result, row: Result) -> Result:
    """The round with the shortest median step."""
    run: Result = min(row["runs"], key=lambda run: median_step(result, run))
    return run


def step_time(result: Result, row: Result) -> float:
    """Seconds: the median step of the best round."""
    return median_step(result, best_run(result, row))


def peak(row: Result) -> int:
    """Bytes that the process held at most, in the worst round."""
    return int(max(run["process"]["max_rss"] for run in row["runs"]))


def above_imports(row: Result) -> int:
    """The same without what importing the libraries took."""
    return int(max(run["process"]["max_rss"] - run["import_rss"] for run in row["runs"]))


def activations(result: Result) -> int | None:
    """Bytes of the activations and temporaries of the table's model, as PatrickStar counts them."""
    counted = [
        run["notes"]["activations"]
        for row in result["rows"].values()
        for run in row["runs"]
        if run["notes"].get("activations")
    ]
    return min(counted, default=None)


def bytes_a_parameter(result: Result, row: Result) -> str:
    """Memory above imports and activations, for each parameter."""
    counted = activations(result)
    if counted is None:
        return NOT_MEASURED
    return f"{(above_imports(row) - counted) / row['runs'][0]['parameters']:.1f}"


def disk_bytes(result: Result, row: Result, field: str) -> float:
    """Bytes a step, as the kernel counted them: the median step."""
    warmup = result["warmup"]
    return float(statistics.median(n for run in row["runs"] for n in run[field][warmup:]))


def limit_of(result: Result, row: Result) -> Ideal:
    parameters = row["runs"][0]["parameters"]
    h = in_memory(parameters, above_imports(row))
    return ideal(parameters, result["tokens"], h, machine_rates(result))


def reference_of(result: Result, row: Result) -> Result:
    """The row that `row` is compared with."""
    found: Result = result["rows"][row.get("reference", result["reference"])]
    return found


def same_losses(result: Result, row: Result) -> str:
    """Whether the losses are those of the reference, to the bit, or how far off the last one is."""
    reference = reference_of(result, row)
    if not reference["runs"]:
        return NOT_MEASURED
    ours, theirs = row["runs"][0]["losses"], reference["runs"][0]["losses"]
    if row is reference:
        return "—"
    if ours == theirs:
        return "same bits"
    return f"last differs by {abs(ours[-1] - theirs[-1]):.0e}"


HEAD = (
    "",
    "peak RSS, GiB",
    "above imports, GiB",
    "bytes a parameter",
    "step, s",
    "of plain",
    "ideal step, s",
    "achieved/ideal",
    "disk read + written a step, GiB",
    "losses",
)


def cells(result: Result, row: Result) -> list[str]:
    """The columns of HEAD but the first."""
    if not row["runs"]:
        return [NOT_MEASURED] + [""] * (len(HEAD) - 2)
    seconds, limit = step_time(result, row), limit_of(result, row)
    reference = reference_of(result, row)
    of_plain = seconds / step_time(result, reference) if reference["runs"] else None
    read, written = (disk_bytes(result, row, f) for f in ("disk_read", "disk_written"))
    return [
        gib(peak(row)),
        gib(above_imports(row)),
        bytes_a_parameter(result, row),
        f"{seconds:.2f}",
        NOT_MEASURED if of_plain is None else f"{of_plain:.2f}",
        f"{limit.step:.2f} ({limit.bound})",
        f"{seconds / limit.step:.2f}",
        f"{gib(read)} + {gib(written)}",
        same_losses(result, row),
    ]


def training(result: Result) -> Iterator[str]:
    """A table of training runs, the machine it was measured on, and the settings."""
    measured = [row for row in result["rows"].values() if row["runs"]]
    parameters = measured[0]["runs"][0]["parameters"] if measured else None
    size = "" if parameters is None else f" ({parameters / 1e6:.0f}M parameters)"
    yield f"**{result['title']}**{size}"
    yield ""
    yield from table(HEAD, [[row["name"], *cells(result, row)] for row in result["rows"].values()])
    yield ""
    yield from machine(result)
    yield from where_time_went(result)
    yield from settings(result)


def machine(result: Result) -> Iterator[str]:
    rates, facts = machine_rates(result), result["machine"][0]
    slowest = [min(f["disk"][way] for f in result["machine"]) for way in ("read", "write")]
    others = [
        run["process"]["others_cpu"] for row in result["rows"].values() for run in row["runs"]
    ]
    yield (
        f"Machine: {facts['processor']}, {facts['cores']} cores, "
        f"{gib(facts['memory_bytes'])} GiB, {facts['file_system']}, torch {facts['torch']}. "
        f"Measured {result['started']}: bf16 products {rates.gemm / 1e9:.0f} GFLOP/s, copy "
        f"{rates.copy / 1e9:.1f} GB/s (read and written), direct disk reads "
        f"{rates.read / 1e9:.2f} GB/s and writes {rates.write / 1e9:.2f} GB/s (best of before and "
        f"after; the worse: {slowest[0] / 1e9:.2f} and {slowest[1] / 1e9:.2f}). "
        f"{result['warmup']} steps of warm-up and {result['steps']} that count in every process; "
        "the median step of the best round. Other programs used "
        + (f"{min(others):.0%} to {max(others):.0%}" if others else "an unknown part")
        + " of the processors while rows ran."
    )
    yield ""


def where_time_went(result: Result) -> Iterator[str]:
    """Seconds of each phase, and of the parts of the limit."""
    rows = []
    for row in result["rows"].values():
        if not row["runs"]:
            continue
        limit = limit_of(result, row)
        run = best_run(result, row)
        phases, others = run["phases"], run["process"]["others_cpu"]
        rows.append(
            [row["name"]]
            + [f"{phases[p]:.2f}" for p in ("forward", "backward", "update")]
            + [f"{t:.2f}" for t in (limit.compute, limit.update, limit.disk)]
            + [f"{others:.0%}"]
        )
    if rows:
        yield (
            "Where the time went (seconds, medians of the best round), the three limits, and the "
            "part of the processors that other programs used meanwhile:"
        )
        yield ""
        yield from table(
            ("", "forward", "backward", "update", "compute", "update traffic", "disk", "others"),
            rows,
        )
        yield ""


def settings(result: Result) -> Iterator[str]:
    """What each row was given, and why some have no numbers."""
    for row in result["rows"].values():
        if row["not_measured"]:
            yield f"- {row['name']}: {NOT_MEASURED} ({row['not_measured']})"
        elif row["options"]:
            yield f"- {row['name']}: `{json.dumps(row['options'])}`"
    versions: dict[str, str] = {}
    for row in result["rows"].values():
        for run in row["runs"]:
            versions.update(run["versions"])
    if versions:
        yield "- versions: " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))


def policy(result: Result) -> Iterator[str]:
    """Bytes that each policy moves, beside the least possible."""
    for answer, why in parts_of(result):
        if answer is None:
            yield f"{NOT_MEASURED} ({why})"
            yield ""
            continue
        yield (
            f"**{answer['model']}**: {answer['chunks']} chunks of together "
            f"{gib(answer['bytes'])} GiB, {answer['accesses']} accesses at {answer['moments']} "
            f"moments; GiB moved a step"
        )
        yield ""
        names = list(answer["budgets"][0]["moved"])
        rows = []
        for budget in answer["budgets"]:
            bound, moved = budget["bound"], budget["moved"]
            cells = [f"{budget['part']:.0%} ({gib(budget['capacity'])} GiB)"]
            cells += ["does not fit" if moved[n] is None else gib(moved[n]) for n in names]
            cells.append(NOT_MEASURED if bound is None else gib(bound))
            planned, lru = moved["planned"], moved["lru"]
            cells.append(
                f"{planned / bound:.3f}" if bound and planned is not None else NOT_MEASURED
            )
            cells.append(
                f"{1 - planned / lru:.0%}" if planned is not None and lru else NOT_MEASURED
            )
            rows.append(cells)
        yield from table(
            ("in memory", *names, "lower bound", "planned / bound", "fewer than lru"), rows
        )
        yield ""


def overheads(result: Result) -> Iterator[str]:
    """Hooks, depth and planning."""
    for answer, why in parts_of(result):
        if answer is None:
            yield f"{NOT_MEASURED} ({why})"
            continue
        small = answer["gpt-25m"]
        yield "**gpt-25m, everything in memory** (median seconds, in turns with the plain loop)"
        yield ""
        rows = [
            [name] + [f"{small[key][p]:.3f}" for p in ("forward", "backward", "update")]
            for name, key in (("plain loop", "plain"), ("PatrickStar", "patrickstar"))
        ]
        yield from table(("", "forward", "backward", "update"), rows)
        yield ""
        yield (
            f"Forward and backward take {small['hooks']:+.1%}, a whole step "
            f"{small['step'] - 1:+.1%} beside the plain loop."
        )
        yield ""
        yield "**Depth**: narrow models (milliseconds a step; a layer in brackets)"
        yield ""
        rows = []
        for entry in answer["depth"]:
            layers = entry["layers"]
            cells = [str(layers)]
            for key in ("plain_s", "memory_s", "budget_s"):
                milliseconds = 1e3 * entry[key]
                cells.append(f"{milliseconds:.1f} ({milliseconds / layers:.2f})")
            cells += [f"{1e3 * entry['planning_s']:.1f}", str(entry["accesses"])]
            rows.append(cells)
        yield from table(
            ("layers", "plain", "in memory", "under a budget", "planning, once", "accesses"), rows
        )
        yield ""
    yield from measured_when(result)


def rss(result: Result) -> Iterator[str]:
    """What each process held above its budget and its imports, and whether that was allowed."""
    rows = []
    for part in result["parts"]:
        answer = part.get("answer")
        if answer is None:
            rows.append([" ".join(part["arguments"]), *[""] * 5, NOT_MEASURED])
            continue
        above, allowed = answer["above"], answer["allowed"]
        rows.append(
            [f"{answer['model']}, {answer['precision']} ({answer['parameters'] / 1e6:.0f}M)"]
            + [f"{answer[key] / 2**20:.0f}" for key in ("budget", "booked", "imports", "peak")]
            + [f"{above / 2**20:.0f}", "kept" if above <= allowed else "**broken**"]
        )
    heads = ("model", "host budget", "most in the books", "imports", "peak RSS", "above both")
    yield from table((*heads, "promise"), rows)
    for part in result["parts"]:
        if part["not_measured"]:
            yield ""
            yield f"{' '.join(part['arguments'])}: {NOT_MEASURED} ({part['not_measured']})"
    yield ""
    yield f"Measured {result['started']}; all in MiB."


RENDERERS: dict[str, Callable[[Result], Iterator[str]]] = {
    "training": training,
    "policy": policy,
    "overheads": overheads,
    "parity": parity,
    "network": network,
    "prediction": prediction,
    "rss": rss,
    "capacity": capacity,
}


def block(name: str, results: Path) -> str:
    """What belongs between the markers of table `name`."""
    path = results / f"{name}.json"
    if not path.exists():
        return f"{NOT_MEASURED}: `python benchmarks/run.py --table {name}`"
    result = json.loads(path.read_text())
    return "\n".join(RENDERERS[result.get("kind", "training")](result)).rstrip()


def rendered(page: str, results: Path = RESULTS) -> str:
    """`page` with every table as the results have it."""
    pattern = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
    return pattern.sub(lambda m: m[1] + "\n" + block(m[2], results) + "\n\n" + m[3], page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is out of date")
    given = parser.parse_args(arguments)
    drawing = PAGE.parent / FIGURE
    made = {
        PAGE: rendered(PAGE.read_text()),
        drawing: figure(json.loads((RESULTS / "network.json").read_text())),
    }
    for path, after in made.items():
        if not given.check:
            path.write_text(after)
        elif not path.exists() or path.read_text() != after:
            sys.exit(f"{path.relative_to(ROOT)} is out of date: run python benchmarks/render.py")


if __name__ == "__main__":
    main()
