"""A folder of checkpoints always has the last complete one."""

from __future__ import annotations

import os
import random
import signal
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint import TensorSource, folder, open_checkpoint, write_checkpoint
from patrickstar.checkpoint.folder import beside, find, new_checkpoint, next_sequence
from patrickstar.errors import CheckpointError


def write(where: Path, step: int, tag: str | None = None, **options: Any) -> None:
    """A checkpoint in which every value is `step`."""
    sources = [TensorSource.of(f"w{i}", torch.full((100,), float(step))) for i in range(4)]
    states = [TensorSource.of(f"m{i}", torch.full((100,), float(step))) for i in range(4)]
    tag = tag or f"step{step}"
    write_checkpoint(where, tag, sources, states, {"step": step}, shard_bytes=900, **options)


def read(where: Path, tag: str | None = None) -> int:
    """The step of a checkpoint, in which everything must be of one step."""
    with open_checkpoint(where, tag) as found:
        step = found.state["step"]
        for tensors in (found.weights, found.optimizer):
            assert len(tensors.names()) == 4
            for name in tensors.names():
                assert tensors.read(name).eq(step).all()
    assert isinstance(step, int)
    return step


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_at_call(number: int) -> None:
    """Let the process be killed at the `number`th call that changes a file or a folder."""
    left = number

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return run

    for name in ("pwrite", "posix_fallocate", "fsync", "rename", "replace", "mkdir", "rmdir"):
        setattr(os, name, killing(getattr(os, name)))
    os.unlink = killing(os.unlink)
    exchange = folder._exchange_call()
    folder._exchange_call = lambda: None if exchange is None else killing(exchange)


def write_until_killed(number: int, where: Path, step: int, tag: str | None) -> None:
    kill_at_call(number)
    write(where, step, tag, keep=2)


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "aside"])
@pytest.mark.parametrize("same_tag", [False, True], ids=["new tag", "same tag"])
def test_a_kill_at_any_call_leaves_a_complete_checkpoint(
    same_tag: bool, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(folder, "_exchange_call", lambda: None)
    where, killed = tmp_path / "runs", 0
    tag = "always" if same_tag else None
    write(where, 1, tag)
    step = 2
    for number in range(1, 500):
        status = in_child(partial(write_until_killed, number, where, step, tag))
        found = read(where)
        assert found in (step - 1, step), number
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        killed += 1
        step = found + 1
    assert killed > 30 and found == step
    write(where, step + 1, tag, keep=2)
    kept = ["always", "latest"] if same_tag else ["latest", f"step{step}", f"step{step + 1}"]
    assert names(where) == kept, "what was left behind is gone"


def test_kills_at_random_times_leave_a_complete_checkpoint(tmp_path: Path) -> None:
    draw = random.Random(3)
    write(tmp_path, 1)
    last = 1
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            step = last
            while True:
                step += 1
                write(tmp_path, step, keep=2)
        time.sleep(draw.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = read(tmp_path)
        assert found >= last
        last = found
    assert last > 1


def test_old_checkpoints_are_kept_to_a_number(tmp_path: Path) -> None:
    for step in (5, 9, 2, 7):  # their order is that of saving, not of their names
        write(tmp_path, step, keep=3)
    assert names(tmp_path) == ["latest", "step2", "step7", "step9"]
    write(tmp_path, 9, keep=2)
    assert names(tmp_path) == ["latest", "step7", "step9"]
    assert read(tmp_path) == 9


def test_what_is_no_checkpoint_of_ours_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/state.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("x")
    for step in range(3):
        write(tmp_path, step, keep=1)
    assert names(tmp_path) == ["latest", "mine", "notes.txt", "step2"]


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def interrupted() -> None:
        with new_checkpoint(tmp_path, "step2") as temporary:
            (temporary / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["latest", "step1"] and read(tmp_path) == 1


def test_a_full_disk_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    import resource

    write(tmp_path, 1)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        with pytest.raises(CheckpointError, match="'step2' could not be written"):
            write(tmp_path, 2)
        os._exit(7)

    assert os.WEXITSTATUS(in_child(work)) == 7
    assert names(tmp_path) == ["latest", "step1"] and read(tmp_path) == 1


def test_a_save_that_is_under_way_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with new_checkpoint(tmp_path, "slow") as temporary:
        assert in_child(lambda: write(tmp_path, 1)) == 0
        assert temporary.is_dir()
    assert names(tmp_path) == ["latest", "slow", "step1"]


def test_everything_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "runs", 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "runs").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o700


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    seen = set()
    for _ in range(5):
        with beside(tmp_path, "tag") as temporary:
            seen.add(temporary.name)
    assert len(seen) == 5 and names(tmp_path) == []


BAD_TAGS = ["", ".", "..", "../evil", "a/b", "/etc", "a\\b", "a\0b", "a\nb", ".hidden", "x" * 300]


@pytest.mark.parametrize("tag", [*BAD_TAGS, "latest"])
def test_a_tag_cannot_leave_the_folder(tag: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        write_checkpoint(tmp_path / "runs", tag, [], [], {})
    assert names(tmp_path) in ([], ["runs"])


@pytest.mark.parametrize("tag", BAD_TAGS)
def test_latest_cannot_point_elsewhere(tag: str, tmp_path: Path) -> None:
    write(tmp_path / "evil", 1)
    write(tmp_path / "runs", 1)
    (tmp_path / "runs/latest").write_text(tag)
    with pytest.raises(CheckpointError, match="no plain file name"):
        find(tmp_path / "runs", None)


def test_a_tag_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"'step3'.*there are: step1, step2"):
        find(tmp_path, "step3")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"name one by its tag. There are: step1, step2"):
        find(tmp_path, None)


def test_sequence_numbers_grow_even_when_clocks_do_not(tmp_path: Path) -> None:
    assert next_sequence(tmp_path) == 1
    write(tmp_path, 1)
    os.utime(tmp_path / "step1", (0, 0))
    assert next_sequence(tmp_path) == 2


def test_keep_must_leave_the_checkpoint_itself(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use 1 or more"):
        write(tmp_path, 1, keep=0)


def test_a_disk_that_fails_while_a_checkpoint_is_read_is_the_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TensorSource.of("w", torch.arange(10.0))
    write_checkpoint(tmp_path, "it", [source], [source], {})
    reads = 0

    def counted(call: Any, fails: int) -> Any:
        def read(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads == fails:
                raise OSError(5, "Input/output error")
            return call(*args)

        return read

    real = os.pread, os.preadv
    for fails in range(1, 100):
        reads = 0
        monkeypatch.setattr(os, "pread", counted(real[0], fails))
        monkeypatch.setattr(os, "preadv", counted(real[1], fails))
        try:
            with open_checkpoint(tmp_path) as opened:
                opened.weights.read("w")
        except CheckpointError as error:
            told = str(error)
        else:
            break
        assert "Input/output error" in told and str(tmp_path) in told
    assert fails > 5
