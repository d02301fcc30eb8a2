"""Threads and what is handed to them, under interrupts that come anywhere."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from patrickstar.workers import Flag, Workers
from tests.interrupts import interrupted_at


def running(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_calls_are_made_in_order_and_waited_for() -> None:
    made: list[int] = []
    with Workers(1, "one") as workers:
        tasks = [workers.start(lambda n=n: made.append(n)) for n in range(5)]
        for task in tasks:
            task.wait()
        assert made == [0, 1, 2, 3, 4]


def test_what_a_call_raised_is_raised_where_it_is_waited_for_and_its_thread_goes_on() -> None:
    def fail() -> None:
        raise OSError("the disk failed")

    with Workers(1, "one") as workers:
        failed, fine = workers.start(fail), workers.start(lambda: None)
        fine.wait()
        with pytest.raises(OSError, match="the disk failed"):
            failed.wait()


def test_closing_lets_what_was_started_end_and_ends_the_threads() -> None:
    workers, made = Workers(2, "closed"), []
    gate = threading.Event()
    for _ in range(4):
        workers.start(lambda: made.append(gate.wait(10)))
    threading.Timer(0.05, gate.set).start()
    workers.close()
    assert made == [True] * 4
    assert running("closed") == 0
    with pytest.raises(RuntimeError, match="after close"):
        workers.start(lambda: None)


def test_threads_end_with_the_last_reference_also_when_a_call_has_it() -> None:
    def keeps(workers: Workers, gate: threading.Event) -> None:
        workers.start(lambda: (gate.wait(10), workers))

    gate, workers = threading.Event(), Workers(2, "dropped")
    keeps(workers, gate)
    del workers
    gate.set()
    for _ in range(1000):
        gc.collect()
        if not running("dropped"):
            break
        threading.Event().wait(0.01)
    assert running("dropped") == 0


def test_a_process_ends_after_what_was_started() -> None:
    program = (
        "import time\nfrom patrickstar.workers import Workers\n"
        "workers = Workers(1, 'end')\n"
        "workers.start(lambda: (time.sleep(0.3), print('done', flush=True)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\n"


def test_a_flag_is_waited_for_by_several_and_may_be_set_again() -> None:
    flag, seen = Flag(), []
    assert not flag.wait(0.01) and not flag.is_set()
    waiting = [threading.Thread(target=lambda: seen.append(flag.wait(10))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    flag.set()
    flag.set()
    for thread in waiting:
        thread.join(10)
    assert seen == [True] * 4 and flag.wait() and flag.is_set()


@pytest.mark.timeout(60)
def test_an_interrupt_anywhere_leaves_threads_that_go_on() -> None:
    def work(workers: Workers) -> None:
        for task in [workers.start(lambda: None) for _ in range(3)]:
            task.wait()

    with Workers(2, "counted") as workers, interrupted_at(None, "workers") as lines:
        work(workers)
    assert lines.seen > 20
    for place in range(lines.seen):
        with Workers(2, "interrupted") as workers:
            with suppress(KeyboardInterrupt), interrupted_at(place, "workers"):
                work(workers)
            work(workers)
