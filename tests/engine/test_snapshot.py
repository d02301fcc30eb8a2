"""A checkpoint that is written while training goes on is of one moment."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint import write_checkpoint
from patrickstar.checkpoint.background import BackgroundCheckpoint
from patrickstar.checkpoint.tensor_file import TensorFileWriter, TensorSource
from patrickstar.engine.initialize import make_engine
from patrickstar.errors import CheckpointError

from .saved_runs import Noisy, assert_same, budgets, engine_for, everything, through, train
from .test_training import MIB, Mlp, numbers
from .training import settings


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but state.json, whose sequence number differs."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "state.json"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [0, 1, 2])
def test_it_is_what_saving_at_once_would_have_written(
    precision: str, budget: int, tmp_path: Path
) -> None:
    how = budgets(tmp_path, precision=precision)[budget]
    batches = numbers(5, 8, 64)
    expected = through(Mlp, how, batches)
    engine, optimizer = engine_for(Mlp, how)
    losses = train(engine, optimizer, batches[:2])
    engine.save_checkpoint(tmp_path / "sync", "it")
    engine.save_checkpoint(tmp_path / "async", "it", asynchronous=True)
    losses += train(engine, optimizer, batches[2:])
    engine.wait_for_checkpoint()
    assert losses == expected[0]
    assert_same(everything(engine), expected[1])
    engine.close()
    assert contents(tmp_path / "async/it") == contents(tmp_path / "sync/it")
    engine, optimizer = make_engine(Mlp, how)
    engine.load_checkpoint(tmp_path / "async")
    assert losses[:2] + train(engine, optimizer, batches[2:]) == expected[0]
    assert_same(everything(engine), expected[1])
    engine.close()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_frozen_unused_and_accumulated_are_copied_in_time(steps: int, tmp_path: Path) -> None:
    batches = numbers(6, 8, 32)
    how = settings(precision="bf16", host=MIB // 4, disk=tmp_path, chunk=3000, accumulation=2)
    engine, optimizer = engine_for(Noisy, how)
    train(engine, optimizer, batches[:steps])
    engine.save_checkpoint(tmp_path / "sync", "it")
    engine.save_checkpoint(tmp_path / "async", "it", asynchronous=True)
    train(engine, optimizer, batches[steps:])
    engine.close()
    assert contents(tmp_path / "async/it") == contents(tmp_path / "sync/it")


def test_a_weight_changed_by_hand_is_copied_before(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(precision="bf16", chunk=3000))
    train(engine, optimizer, numbers(2, 8, 32))
    engine.save_checkpoint(tmp_path / "sync", "it")
    engine.save_checkpoint(tmp_path / "async", "it", asynchronous=True)
    with torch.no_grad():
        engine.module.get_parameter("head.weight").fill_(3.0)
    other = {name: torch.zeros_like(v) for name, v in engine.state_dict().items()}
    engine.load_state_dict(other)
    engine.wait_for_checkpoint()
    assert contents(tmp_path / "async/it") == contents(tmp_path / "sync/it")
    assert not engine.state_dict()["head.weight"].any()
    engine.close()


def test_saves_follow_each_other_and_closing_completes_the_last(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=3000))
    for batch in numbers(5, 8, 32):
        train(engine, optimizer, [batch])
        engine.save_checkpoint(tmp_path, keep=2, asynchronous=True)
    engine.close()
    assert sorted(os.listdir(tmp_path)) == ["global_step4", "global_step5", "latest"]
    engine, _ = make_engine(Noisy, settings(chunk=3000))
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 5
    engine.close()


def test_a_failure_is_told_by_the_next_call_and_training_is_not_harmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = numbers(4, 8, 32)
    expected = through(Noisy, settings(chunk=3000), batches)
    engine, optimizer = engine_for(Noisy, settings(chunk=3000))
    losses = train(engine, optimizer, batches[:2])
    engine.save_checkpoint(tmp_path, "good")

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(TensorFileWriter, "write", fail)
        engine.save_checkpoint(tmp_path, "bad", asynchronous=True)
        losses += train(engine, optimizer, batches[2:])
        with pytest.raises(CheckpointError, match=r"'bad' could not be written.*No space left"):
            engine.wait_for_checkpoint()
    assert losses == expected[0]
    assert sorted(os.listdir(tmp_path)) == ["good", "latest"]
    engine.save_checkpoint(tmp_path, "after")
    engine.close()


def test_copies_that_wait_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = TensorFileWriter.write

    def write(self: TensorFileWriter, name: str, start: int, tensor: torch.Tensor) -> None:
        time.sleep(0.005)
        slow(self, name, start, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", write)
    value = torch.arange(1000.0)
    sources = [TensorSource.of(f"w{i}", value + i) for i in range(20)]
    saving = BackgroundCheckpoint(tmp_path, "it", sources, [], {}, waiting_bytes=8000)
    most = 0
    for number, source in enumerate(sources):
        saving.put(source.name, 0, value + number)
        most = max(most, saving._handed - saving._done)
    assert 4000 < most <= 8000
    saving.complete()
    saving.wait()
    path = write_checkpoint(tmp_path, "sync", sources, [], {})
    assert contents(path) == contents(saving.path)


def test_a_checkpoint_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    source = TensorSource.of("w", torch.zeros(10))
    saving = BackgroundCheckpoint(tmp_path, "it", [source], [], {}, waiting_bytes=100)
    saving.abandon()
    assert os.listdir(tmp_path) == []
