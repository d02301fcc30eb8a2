"""The spool file is private, nameless, preallocated, and never silently short."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from patrickstar.errors import PatrickStarError, SpoolError
from patrickstar.memory.spool import Slot, Spool

PAGE = 4096


def pages(count: int, value: int = 0) -> memoryview:
    """Page-aligned memory."""
    data = memoryview(mmap.mmap(-1, count * PAGE))
    data[:] = bytes([value]) * (count * PAGE)
    return data


def test_a_slot_holds_what_was_written_to_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    slots = [spool.allocate(n * PAGE) for n in (1, 3, 2)]
    for value, slot in enumerate(slots):
        spool.write(slot, pages(slot.nbytes // PAGE, value + 1))
    for value, slot in enumerate(slots):
        back = pages(slot.nbytes // PAGE)
        spool.read(slot, back)
        assert set(bytes(back)) == {value + 1}
    spool.close()


def test_the_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        spool = Spool(tmp_path)
    finally:
        os.umask(old)
    status = os.fstat(spool._file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert not os.get_inheritable(spool._file), "programs that are started do not get the file"
    spool.close()


def test_the_folder_is_made(tmp_path: Path) -> None:
    Spool(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b").is_dir()


def test_nothing_is_left_when_the_process_is_killed(tmp_path: Path) -> None:
    program = f"""
        import time
        from patrickstar.memory.spool import Spool
        spool = Spool({str(tmp_path)!r})
        spool.preallocate(64 << 20)
        print("ready", flush=True)
        time.sleep(60)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    with run.stdout:
        assert run.stdout.readline() == "ready\n"
    files = [
        fd.stat()
        for fd in Path(f"/proc/{run.pid}/fd").iterdir()
        if str(tmp_path) in str(fd.readlink())
    ]
    assert [(file.st_nlink, file.st_blocks * 512 >= 64 << 20) for file in files] == [(0, True)]
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == [], "the file had no name, so its space is free again"


def test_space_is_preallocated(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.preallocate(1 << 20)
    assert os.fstat(spool._file).st_blocks * 512 >= 1 << 20
    size = os.fstat(spool._file).st_size
    for _ in range(256):
        spool.allocate(PAGE)
    assert os.fstat(spool._file).st_size == size
    spool.close()


def test_a_file_system_that_cannot_promise_space_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    spool = Spool(tmp_path)
    slot = spool.allocate(PAGE)
    spool.write(slot, pages(1, 5))
    back = pages(1)
    spool.read(slot, back)
    assert bytes(back) == bytes([5]) * PAGE
    spool.close()


def test_a_disk_that_is_too_small_is_named_with_the_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = Spool(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpoolError, match=r"too small: the spool file needs 1\.00 GiB") as caught:
        spool.preallocate(1 << 30)
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert isinstance(caught.value, PatrickStarError)
    with pytest.raises(SpoolError):
        spool.allocate(PAGE)
    monkeypatch.undo()
    assert spool.allocate(PAGE) == Slot(((0, PAGE),)), "a refusal changes nothing"
    spool.close()


def test_a_real_disk_that_is_too_small_is_refused(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(SpoolError, match="too small"):
        spool.preallocate(1 << 50)
    spool.close()


def test_the_capacity_is_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path, capacity=4 * PAGE)
    slots = [spool.allocate(2 * PAGE) for _ in range(2)]
    with pytest.raises(SpoolError, match=r"disk budget of 16\.00 KiB is too small: 20\.00 KiB"):
        spool.allocate(PAGE)
    spool.free(slots[0])
    assert spool.allocate(PAGE) == Slot(((0, PAGE),))
    spool.close()


def test_what_fits_the_capacity_by_its_bytes_fits_whatever_lies_between(tmp_path: Path) -> None:
    spool = Spool(tmp_path, capacity=6 * PAGE)
    slots = [spool.allocate(count * PAGE) for count in (1, 1, 2, 1)]
    spool.free(slots[0])
    spool.free(slots[2])
    assert spool.allocate(4 * PAGE).nbytes == 4 * PAGE, "1, 2 and 1 in three places"
    spool.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SpoolError, match="cannot make a spool file") as caught:
        Spool(file / "below")
    assert str(file) in str(caught.value)


def test_a_slot_in_several_stretches_of_the_file_holds_what_was_written(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.preallocate(10 * PAGE)
    slots = [spool.allocate(count * PAGE) for count in (2, 1, 3, 1, 2, 1)]
    for number, slot in enumerate(slots):
        spool.write(slot, pages(slot.nbytes // PAGE, number))
    for slot in slots[::2]:
        spool.free(slot)
    split = spool.allocate(6 * PAGE)
    assert len(split.extents) == 3
    assert split.nbytes == 6 * PAGE
    assert os.fstat(spool._file).st_size == 10 * PAGE
    data = pages(6)
    data[:] = bytes(i // PAGE + 100 for i in range(6 * PAGE))
    spool.write(split, data)
    back = pages(6)
    spool.read(split, back)
    assert back == data
    for number in (1, 3, 5):
        spool.read(slots[number], back[:PAGE])
        assert set(bytes(back[:PAGE])) == {number}, "nobody else's bytes are touched"
    assert os.pwritev(spool._file, [pages(1)], split.extents[2][0]) == PAGE
    with pytest.raises(SpoolError, match="not the bytes that were written there"):
        spool.read(split, back)
    spool.close()


def test_what_a_disk_gave_before_it_was_full_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def half(file: int, offset: int, length: int) -> None:
        real(file, offset, length // 2)  # as ext4 does
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = Spool(tmp_path)
    spool.preallocate(PAGE)
    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(SpoolError):
        spool.preallocate(1 << 20)
    assert os.fstat(spool._file).st_blocks * 512 == PAGE
    spool.close()


class ShortCalls:
    """`os.preadv` or `os.pwritev` that transfer at most `counts[i]` bytes at call `i`."""

    def __init__(self, call: Any, counts: Sequence[int]) -> None:
        self.call, self.counts, self.made = call, list(counts), 0

    def __call__(self, file: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % PAGE == 0, "a direct transfer goes on from an aligned place"
        limit = self.counts[self.made] if self.made < len(self.counts) else 1 << 60
        self.made += 1
        if limit == 0:
            return 0
        whole = -(-min(limit, buffers[0].nbytes) // PAGE) * PAGE
        return min(limit, int(self.call(file, [buffers[0][:whole]], offset)))


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_short_transfers_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    spool = Spool(tmp_path)
    slot = spool.allocate(8 * PAGE)
    data = pages(8)
    data[:] = bytes(i // PAGE + 1 for i in range(8 * PAGE))
    short = ShortCalls(getattr(os, name), [PAGE, 2 * PAGE + 100, PAGE])
    monkeypatch.setattr(os, name, short)
    spool.write(slot, data)
    back = pages(8)
    spool.read(slot, back)
    assert back == data
    assert short.made == 4
    spool.close()


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
@pytest.mark.parametrize("counts", [[0], [100], [PAGE, 0], [2 * PAGE, 4095]])
def test_a_transfer_that_stops_short_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, counts: list[int]
) -> None:
    spool = Spool(tmp_path)
    slot = spool.allocate(8 * PAGE)
    spool.write(slot, pages(8, 1))
    monkeypatch.setattr(os, name, ShortCalls(getattr(os, name), counts))
    transfer = spool.write if name == "pwritev" else spool.read
    with pytest.raises(SpoolError, match="it ended after") as caught:
        transfer(slot, pages(8))
    assert caught.value.errno == errno.EIO
    assert "resume from the last checkpoint" in str(caught.value)
    monkeypatch.undo()
    spool.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_a_transfer_that_fails_says_why_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    spool = Spool(tmp_path)
    slot = spool.allocate(PAGE)
    monkeypatch.setattr(os, name, fail)
    transfer = spool.write if name == "pwritev" else spool.read
    with pytest.raises(SpoolError, match=os.strerror(code)) as caught:
        transfer(slot, pages(1))
    assert caught.value.errno == code
    assert str(tmp_path) in str(caught.value)
    spool.close()


def test_where_direct_io_is_promised_and_refused_the_file_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwritev
    calls = 0

    def refuse_first(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return int(real(*args))

    monkeypatch.setattr(os, "pwritev", refuse_first)
    spool = Spool(tmp_path)
    assert not spool.direct
    slot = spool.allocate(PAGE)
    spool.write(slot, pages(1, 3))
    back = pages(1)
    spool.read(slot, back)
    assert bytes(back) == bytes([3]) * PAGE
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_slots_are_written_and_read_by_several_threads(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    slots = [spool.allocate(64 * PAGE) for _ in range(4)]
    wrong: list[int] = []

    def work(value: int) -> None:
        data, back = pages(64, value), pages(64)
        for _ in range(20):
            spool.write(slots[value], data)
            spool.read(slots[value], back)
            if back != data:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    spool.close()


@pytest.mark.parametrize("damage", ["one bit", "swapped", "lost write"])
def test_verified_slots_notice_bytes_that_were_never_written(tmp_path: Path, damage: str) -> None:
    spool = Spool(tmp_path, verify=True)
    slot = spool.allocate(40 * PAGE)
    data = pages(40)
    data[:] = bytes((i * 7 + i // PAGE) % 251 for i in range(40 * PAGE))
    spool.write(slot, data)
    back = pages(40)
    spool.read(slot, back)
    assert back == data
    bad = pages(40)
    bad[:] = data
    if damage == "one bit":
        bad[30 * PAGE + 17] ^= 4
    elif damage == "swapped":
        bad[: 16 * PAGE], bad[16 * PAGE : 32 * PAGE] = (
            data[16 * PAGE : 32 * PAGE],
            data[: 16 * PAGE],
        )
    else:
        bad[:] = pages(40)
    assert os.pwritev(spool._file, [bad], slot.offset) == bad.nbytes
    with pytest.raises(SpoolError, match="not the bytes that were written there"):
        spool.read(slot, back)
    spool.close()


def test_closing_twice_is_harmless_and_frees_the_handle(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    spool = Spool(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    spool.close()
    spool.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kill_at_any_moment_leaves_no_name_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", None)  # would have a name for a moment
    spool = Spool(tmp_path)
    assert list(tmp_path.iterdir()) == []
    spool.close()


def test_without_files_that_have_no_name_what_a_killed_run_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    old, new, other = (tmp_path / f"{n}.spool" for n in ("patrickstar-a", "patrickstar-b", "c"))
    for file in (old, new, other):
        file.touch()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    spool = Spool(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other, new]
    spool.close()
