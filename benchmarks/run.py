"""Measure the tables of docs/benchmarks.md: `python benchmarks/run.py`, or `make bench`.

    python benchmarks/run.py --table first --steps 5 --opponents plain,patrickstar,deepspeed

Every row runs in a process of its own, one after another and in turns (all rows once, then all rows
again), so that a machine that slows down for a while does so for everybody. The peak of a row is
what the kernel says of the finished process. This process imports no torch and stays small, because
a child starts with its parent's peak.

DeepSpeed is found by import, or in the environment of the interpreter that `--deepspeed-python` or
the variable DEEPSPEED_PYTHON names. Without it its rows say "not measured".
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.job import Job  # noqa: E402
from benchmarks.tables import OPPONENTS, SCRIPTS, TABLES, Row, Script, Table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


class NotMeasuredError(Exception):
    """A row has no numbers; the message says why."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How this run is made."""

    steps: int
    warmup: int
    rounds: int
    threads: int
    opponents: tuple[str, ...]
    deepspeed_python: str
    disk: str
    output: Path
    time_limit: float
    disk_bytes: int
    add: bool = False
    rows: tuple[str, ...] = ()

    def of(self, table: Table) -> Settings:
        """The same but for what `table` has a word of its own on."""
        return dataclasses.replace(
            self,
            steps=self.steps if table.steps is None else table.steps,
            warmup=self.warmup if table.warmup is None else table.warmup,
            time_limit=max(self.time_limit, table.time_limit),
        )


def environment(threads: int) -> dict[str, str]:
    """What a child is started with."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def busy_seconds() -> float:
    """Processor seconds that the whole machine has spent, over all cores."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, stat.read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run_child(
    command: list[str], log: Path, settings: Settings, extra: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run `command` to its end, with `extra` in its environment; what the kernel says of it.

    `max_rss` counts what this process held when it forked too, so this process stays lean: it
    imports no torch.

    Raises:
        NotMeasuredError: it failed or took too long.
    """
    load, busy, began = os.getloadavg(), busy_seconds(), time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(settings.threads), **(extra or {})},
            stdout=out,
            stderr=out,
        )
    first_to_be_killed(child.pid)
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() - began > settings.time_limit:
            child.kill()
            child.wait()
            raise NotMeasuredError(f"took longer than {settings.time_limit:.0f} s")
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if child.returncode == -signal.SIGKILL:
        held = f"{usage.ru_maxrss / 2**20:.1f} GiB"
        raise NotMeasuredError(f"killed by the kernel when it held {held}: no memory was left")
    if child.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip() if lines else "no output"
        raise NotMeasuredError(f"ended with status {child.returncode}: {last[:300]}")
    others = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
    return {
        "max_rss": usage.ru_maxrss * 1024,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "seconds": seconds,
        "load_before": load[0],
        "others_cpu": max(0.0, others / seconds / (os.cpu_count() or 1)),
    }


def first_to_be_killed(pid: int) -> None:
    """What does not fit into this machine is killed before anything else is."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def interpreter(row: Row, settings: Settings) -> str:
    return settings.deepspeed_python if row.opponent == "deepspeed" else sys.executable


def measure_once(table: Table, row: Row, settings: Settings) -> dict[str, Any]:
    """One process of `row`."""
    job = Job(
        system=row.system,
        model=row.model or table.model,
        options=row.options,
        changes=table.changes,
        sequences=table.sequences,
        length=table.length,
        steps=settings.steps,
        warmup=settings.warmup,
        threads=settings.threads,
        clipping=row.options.get("clipping", Job.clipping),
        disk=settings.disk,
        learning_rate=table.learning_rate,
        repeat=table.repeat,
    )
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        python = interpreter(row, settings)
        command = [python, "-m", "benchmarks.row", job.to_json(), str(answer)]
        extra = row.options.get("environment")
        kernel = run_child(command, Path(folder) / "log", settings, extra)
        return {**json.loads(answer.read_text()), "process": kernel}


def facts(settings: Settings) -> dict[str, Any]:
    """The machine's rates, measured now by a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "facts.json"
        command = [sys.executable, "-m", "benchmarks.machine", "--disk", settings.disk]
        command += ["--disk-bytes", str(settings.disk_bytes), "--json", str(answer)]
        command += ["--threads", str(settings.threads)]
        kernel = run_child(command, Path(folder) / "log", settings)
        return {**json.loads(answer.read_text()), "process": kernel}


def missing(opponent: str, settings: Settings) -> str | None:
    """Why `opponent` cannot be measured here; None if it can."""
    if opponent not in settings.opponents:
        return "left out of this run"
    if opponent != "deepspeed":
        return None
    command = [settings.deepspeed_python, "-m", "benchmarks.systems.zero"]
    print("building DeepSpeed's kernels (minutes, the first time)", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            patient = dataclasses.replace(settings, time_limit=1800.0)
            run_child(command, Path(folder) / "log", patient)
        except (NotMeasuredError, OSError) as error:
            return f"DeepSpeed cannot be used from {Path(command[0]).name}: {error}"
    return None


def new_result(table: Table, settings: Settings, reasons: dict[str, str | None]) -> dict[str, Any]:
    """The results of `table` before anything is measured."""
    rows = {
        row.key: {
            "name": row.name,
            "opponent": row.opponent,
            "options": row.options,
            "model": row.model or table.model,
            "reference": row.reference or table.reference,
            "not_measured": reasons[row.opponent],
            "runs": [],
        }
        for row in table.rows
    }
    return {
        "table": table.key,
        "kind": table.kind,
        "title": table.title,
        "model": table.model,
        "tokens": table.sequences * table.length,
        "reference": table.reference,
        "steps": settings.steps,
        "warmup": settings.warmup,
        "started": now(),
        "machine": [],
        "rows": rows,
    }


def earlier(table: Table, settings: Settings) -> dict[str, Any] | None:
    """The results that this run adds rounds to, if it was asked to and can."""
    path = settings.output / f"{table.key}.json"
    if not settings.add or not path.exists():
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    same = all(result[key] == getattr(settings, key) for key in ("steps", "warmup"))
    alike = {key: row["options"] for key, row in result["rows"].items()} == {
        row.key: row.options for row in table.rows
    }
    if not (same and alike):
        raise SystemExit(f"{path} was measured with other steps or settings; run without --add")
    return result


def measure_table(table: Table, settings: Settings) -> None:
    """Measure `table` and write its results, after every process anew."""
    settings = settings.of(table)
    reasons = {name: missing(name, settings) for name in {row.opponent for row in table.rows}}
    result = earlier(table, settings) or new_result(table, settings, reasons)
    result["machine"].append(facts(settings))
    rows = result["rows"]
    for round_ in range(settings.rounds):
        for row in table.rows:
            entry = rows[row.key]
            if entry["not_measured"] or reasons[row.opponent]:
                continue
            if settings.rows and row.key not in settings.rows:
                continue
            try:
                run = measure_once(table, row, settings)
            except NotMeasuredError as error:
                if not entry["runs"]:
                    entry["not_measured"] = str(error)
                print(f"{table.key} {row.key}: {error}", flush=True)
                continue
            entry["runs"].append(run)
            median = statistics.median(run["step_s"][settings.warmup :])
            print(
                f"{table.key} round {round_ + 1} {row.key}: {median:.2f} s a step, "
                f"{run['process']['max_rss'] / 2**30:.2f} GiB, "
                f"others {run['process']['others_cpu']:.0%} of the processors",
                flush=True,
            )
            write(result, settings)
    result["machine"].append(facts(settings))
    result["finished"] = now()
    write(result, settings)


def measure_script(script: Script, settings: Settings) -> None:
    """Run the parts of `script` and write what they say."""
    result: dict[str, Any] = {
        "table": script.key,
        "kind": script.key,
        "started": now(),
        "parts": [],
    }
    for part in script.parts:
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            command = [sys.executable, "-m", script.module, *part]
            command += ["--disk", settings.disk, "--json", str(answer)]
            if script.opponent:
                command += ["--deepspeed-python", settings.deepspeed_python]
            entry: dict[str, Any] = {"arguments": list(part), "not_measured": None}
            try:
                entry["process"] = run_child(command, Path(folder) / "log", settings)
                entry["answer"] = json.loads(answer.read_text())
            except NotMeasuredError as error:
                entry["not_measured"] = str(error)
            print(f"{script.key} {' '.join(part)}: {entry['not_measured'] or 'done'}", flush=True)
        result["parts"].append(entry)
        write(result, settings)


def write(result: dict[str, Any], settings: Settings) -> None:
    settings.output.mkdir(parents=True, exist_ok=True)
    path = settings.output / f"{result['table']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--table", action="append", choices=[*TABLES, *SCRIPTS], help="default: all"
    )
    parser.add_argument("--steps", type=int, default=6, help="that count, in every process")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="turns of all rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--opponents", default=",".join(OPPONENTS), help="who is measured")
    parser.add_argument(
        "--deepspeed-python",
        default=os.environ.get("DEEPSPEED_PYTHON", sys.executable),
        help="an interpreter that can import deepspeed",
    )
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a real disk")
    parser.add_argument("--disk-bytes", type=int, default=3 << 30, help="of the disk measurement")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--add", action="store_true", help="rounds to results that are there")
    parser.add_argument("--rows", default="", help="only these, by key, as in the results")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for a process")
    given = parser.parse_args()
    opponents = tuple(name for name in given.opponents.split(",") if name)
    if unknown := set(opponents) - set(OPPONENTS):
        parser.error(f"--opponents: {', '.join(sorted(unknown))}; choose from {OPPONENTS}")
    settings = Settings(
        steps=given.steps,
        warmup=given.warmup,
        rounds=given.rounds,
        threads=given.threads,
        opponents=opponents,
        deepspeed_python=given.deepspeed_python,
        disk=given.disk,
        output=given.output,
        time_limit=given.time_limit,
        disk_bytes=given.disk_bytes,
        add=given.add,
        rows=tuple(key for key in given.rows.split(",") if key),
    )
    for key in given.table or [*TABLES, *SCRIPTS]:
        if key in TABLES:
            measure_table(TABLES[key], settings)
        else:
            measure_script(SCRIPTS[key], settings)
    if settings.output == RESULTS:
        from benchmarks.render import main as render

        render([])


if __name__ == "__main__":
    main()
