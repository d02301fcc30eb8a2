"""Copies beside the computation: handed back once each, with what stopped them."""

from __future__ import annotations

import threading

import pytest

from patrickstar.memory.transfer import Transfer, TransferThreads


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(10)


def test_completions_come_in_the_order_copies_end() -> None:
    threads, gate = TransferThreads(2), threading.Event()
    slow, quick = Transfer(1, 0, 1), Transfer(2, 0, 1)
    threads.start(slow, lambda: assert_set(gate))
    threads.start(quick, lambda: None)
    assert threads.wait().transfer == quick
    assert threads.poll() is None
    gate.set()
    assert threads.wait().transfer == slow
    assert threads.poll() is None
    threads.close()


def test_what_stopped_a_copy_is_handed_back_and_the_thread_goes_on() -> None:
    threads = TransferThreads(1)

    def fail() -> None:
        raise OSError("the disk failed")

    threads.start(Transfer(1, 0, 1), fail)
    threads.start(Transfer(2, 0, 1), lambda: None)
    first, second = threads.wait(), threads.wait()
    assert isinstance(first.error, OSError)
    assert second.error is None
    threads.close()


def test_closing_waits_for_copies_under_way() -> None:
    threads, done = TransferThreads(1), []
    gate = threading.Event()
    threads.start(Transfer(1, 0, 1), lambda: done.append(gate.wait(10)))
    threading.Timer(0.05, gate.set).start()
    threads.close()
    assert done == [True]
    with pytest.raises(RuntimeError):
        threads.start(Transfer(2, 0, 1), lambda: None)
