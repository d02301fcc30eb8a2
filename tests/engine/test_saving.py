"""A run that is saved and resumed gives the bits of one that went through."""

from __future__ import annotations

import dataclasses
import gc
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from patrickstar.checkpoint import open_checkpoint
from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.errors import CheckpointError
from patrickstar.memory import Fifo, Lru
from patrickstar.optim import SGD, Adagrad, DynamicLossScale, WarmupLR

from ..checkpoint.test_tensor_file import memory
from .saved_runs import (
    Noisy,
    Reader,
    assert_same,
    budgets,
    engine_for,
    everything,
    resumed,
    through,
    train,
)
from .test_pieces import PIECE, Wide
from .test_pieces import batches as token_batches
from .test_training import MIB, Mlp, numbers
from .training import settings


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    precision: str, budget: int, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 64)
    how = budgets(tmp_path, precision=precision, clipping=0.5)[budget]
    expected = through(Mlp, how, batches)
    got = resumed(Mlp, how, batches, 3, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_goes_on_in_another_budget_and_chunk_size(precision: str, tmp_path: Path) -> None:
    batches = numbers(6, 8, 64)
    small = settings(precision=precision, host=1 * MIB, disk=tmp_path, chunk=9000)
    large = settings(precision=precision, chunk=40000)
    expected = through(Mlp, large, batches)
    for first, second in ((small, large), (large, small)):
        got = resumed(Mlp, first, batches, 2, tmp_path / "ckpt", second)
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


@pytest.mark.parametrize("policy", [Lru(), Fifo()], ids=["lru", "fifo"])
def test_a_run_without_plans_resumes_too(policy: Any, tmp_path: Path) -> None:
    batches = numbers(4, 8, 64)
    how = settings(host=1 * MIB, disk=tmp_path, chunk=9000, policy=policy, plan=False)
    expected = through(Mlp, how, batches)
    got = resumed(Mlp, how, batches, 2, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("after", [1, 2, 3, 5])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_resumes_in_the_middle_of_an_accumulation(
    precision: str, after: int, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 32)
    options: dict[str, Any] = {"precision": precision, "accumulation": 3, "clipping": 0.1}
    free, tight = (
        settings(chunk=5000, **options),
        settings(host=MIB // 4, disk=tmp_path, chunk=3000, **options),
    )
    expected = through(Noisy, free, batches)
    for first, second in ((tight, tight), (tight, free)):
        got = resumed(Noisy, first, batches, after, tmp_path / "ckpt", second)
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_dropout_buffers_frozen_and_seldom_used_parameters_survive(
    after: int, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 32)
    how = settings(host=1 * MIB, disk=tmp_path, chunk=2000)
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, after, tmp_path / "ckpt")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_in_pieces_are_stored_whole(
    tied: bool, accumulation: int, tmp_path: Path
) -> None:
    def provider() -> nn.Module:
        return Wide(tied)

    given = token_batches(5)
    whole = settings(accumulation=accumulation)
    in_pieces = dataclasses.replace(
        settings(chunk=PIECE, accumulation=accumulation), piece_size=PIECE
    )
    other_pieces = dataclasses.replace(in_pieces, piece_size=2 * PIECE, chunk_limit=2 * PIECE)
    expected = through(provider, in_pieces, given)
    got = resumed(provider, in_pieces, given, 3, tmp_path / "a")
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])
    for first, second in ((whole, in_pieces), (in_pieces, whole), (in_pieces, other_pieces)):
        engine, optimizer = engine_for(provider, first)
        train(engine, optimizer, given[:3])
        engine.save_checkpoint(tmp_path / "b")
        before = {k: v.clone() for k, v in engine.state_dict().items()}
        engine.close()
        engine, _ = make_engine(provider, second)
        engine.load_checkpoint(tmp_path / "b")
        for name, weight in engine.state_dict().items():
            assert torch.equal(weight, before[name]), name
        engine.close()


@pytest.mark.parametrize(
    ("rule", "hyper"),
    [(SGD(), {"lr": 1e-2, "momentum": 0.9}), (Adagrad(), {"lr": 1e-2})],
    ids=["SGD", "Adagrad"],
)
def test_other_optimizers_resume_too(rule: Any, hyper: Any, tmp_path: Path) -> None:
    batches = numbers(5, 8, 32)
    how = settings(chunk=2000, rule=rule, hyper=hyper)
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 2, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


def test_the_learning_rate_schedule_goes_on(tmp_path: Path) -> None:
    batches = numbers(6, 8, 32)
    how = dataclasses.replace(
        settings(chunk=2000),
        make_scheduler=lambda optimizer: WarmupLR(optimizer, 0.0, 1e-2, 10, "linear"),
    )
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 3, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


class Tiny(nn.Module):
    """Small enough for 16-bit floats on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).float().square().mean()


def test_the_loss_scale_and_its_overflows_resume(tmp_path: Path) -> None:
    def how() -> RunSettings:
        made = settings(precision="fp16")
        made.precision.scaler = DynamicLossScale(initial_scale_power=20, loss_scale_window=2)
        return made

    batches = numbers(10, 16)
    expected = through(Tiny, how(), batches)
    assert expected[1]["skipped_steps"] > 1
    for after in (1, 5):
        got = resumed(Tiny, how(), batches, after, tmp_path, how())
        assert got[0] == expected[0]
        assert_same(got[1], expected[1])


def test_saving_right_after_loading_gives_the_same_checkpoint(tmp_path: Path) -> None:
    how = settings(precision="bf16", chunk=2000, accumulation=2)
    engine, optimizer = engine_for(Noisy, how)
    train(engine, optimizer, numbers(3, 8, 32))
    engine.save_checkpoint(tmp_path / "a")
    engine.load_checkpoint(tmp_path / "a")  # right after saving
    engine.save_checkpoint(tmp_path / "b")
    engine.close()
    engine, _ = make_engine(Noisy, how)
    engine.load_checkpoint(tmp_path / "a")
    engine.save_checkpoint(tmp_path / "c")
    engine.close()
    names = sorted(p.name for p in (tmp_path / "a/global_step1").iterdir())
    assert len(names) == 5
    for other in ("b", "c"):
        for name in names:
            ours, theirs = (tmp_path / f / "global_step1" / name for f in ("a", other))
            assert ours.read_bytes() == theirs.read_bytes(), (other, name)


def test_a_model_that_was_not_trained_yet_is_saved_too(tmp_path: Path) -> None:
    batches = numbers(3, 8, 32)
    how = settings(chunk=2000, precision="bf16")
    expected = through(Noisy, how, batches)
    got = resumed(Noisy, how, batches, 0, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


def test_weights_changed_by_hand_before_saving_are_those_that_training_goes_on_with(
    tmp_path: Path,
) -> None:
    how = settings(chunk=2000, precision="bf16")
    batches = numbers(4, 8, 32)

    def change(engine: Engine) -> None:
        with torch.no_grad():
            engine.module.get_parameter("head.weight").mul_(1.5)

    engine, optimizer = engine_for(Noisy, how)
    losses = train(engine, optimizer, batches[:2])
    change(engine)
    losses += train(engine, optimizer, batches[2:])
    expected = everything(engine)
    engine.close()
    engine, optimizer = engine_for(Noisy, how)
    train(engine, optimizer, batches[:2])
    change(engine)
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine, optimizer = make_engine(Noisy, how)
    engine.load_checkpoint(tmp_path)
    assert train(engine, optimizer, batches[2:]) == losses[2:]
    assert_same(everything(engine), expected)
    engine.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    ],
    ids=["cosine", "steps", "one cycle", "lambda"],
)
def test_schedulers_of_torch_go_on(make: Any, tmp_path: Path) -> None:
    batches = numbers(6, 8, 32)
    how = dataclasses.replace(settings(chunk=5000), make_scheduler=make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about the order of first calls
        expected = through(Noisy, how, batches)
        got = resumed(Noisy, how, batches, 3, tmp_path)
    assert got[0] == expected[0]
    assert_same(got[1], expected[1])


@pytest.mark.parametrize(("first", "second"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_another_precision_takes_the_most_precise_weights(
    first: str, second: str, tmp_path: Path
) -> None:
    engine, optimizer = engine_for(Mlp, settings(precision=first, chunk=40000))
    train(engine, optimizer, numbers(2, 8, 64))
    engine.save_checkpoint(tmp_path)
    before = everything(engine)
    engine.close()
    engine, _ = make_engine(Mlp, settings(precision=second, chunk=40000))
    engine.load_checkpoint(tmp_path)
    after = everything(engine)
    engine.close()
    for name in ("head.weight", "down.0.bias"):
        precise = before.get(f"master of {name}", before[name].flatten())
        assert torch.equal(after.get(f"master of {name}", after[name].flatten()), precise)
        assert torch.equal(after[name].flatten(), precise.to(after[name].dtype))
        for key in (f"exp_avg of {name}", f"step of {name}"):
            assert torch.equal(torch.as_tensor(after[key]), torch.as_tensor(before[key]))


def test_the_position_in_the_data_is_kept(tmp_path: Path) -> None:
    engine, _ = engine_for(Noisy, settings(chunk=5000))
    engine.data_position = Reader()
    engine.data_position.place = 17
    engine.save_checkpoint(tmp_path)
    engine.data_position.place = 20
    engine.load_checkpoint(tmp_path)
    assert engine.data_position.place == 17
    engine.close()


def test_saving_and_loading_stay_inside_the_budget(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    how = settings(host=40 * MIB, disk=tmp_path, chunk=MIB)  # of 96 MiB in chunks of 4 MiB
    engine, optimizer = engine_for(Large, how)
    train(engine, optimizer, numbers(2, 2, 1024))
    for work in (engine.save_checkpoint, engine.load_checkpoint):
        engine.reset_peak()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        work(tmp_path / "ckpt")
        report = engine.memory_report()
        assert report.tiers["host"].peak <= 40 * MIB
        # What the budget has not given out yet may be taken; beyond it, two chunks and slack.
        assert memory("VmHWM") - before < 40 * MIB + 2 * 4 * MIB + 8 * MIB
    engine.close()


def test_only_the_weights_can_be_written_for_use_elsewhere(tmp_path: Path) -> None:
    engine, _ = engine_for(Noisy, settings(precision="bf16", chunk=5000))
    expected = {k: v.clone() for k, v in engine.state_dict().items()}
    del expected["other_head.weight"]  # the same as head.weight
    for name, file in (
        ("model.safetensors", "model.safetensors"),
        ("pytorch_model.bin", "model.safetensors"),
        ("mine.bin", "mine.safetensors"),
    ):
        assert engine.save_16bit_model(tmp_path / name, name)
        assert [p.name for p in (tmp_path / name).iterdir()] == [file]
        loaded = safetensors.torch.load_file(tmp_path / name / file)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    engine.save_16bit_model(tmp_path / "left", exclude_frozen_parameters=True)
    left = safetensors.torch.load_file(tmp_path / "left/model.safetensors")
    assert set(expected) - set(left) == {"frozen.weight", "frozen.bias"}
    with pytest.raises(CheckpointError, match="no plain file name"):
        engine.save_16bit_model(tmp_path, "../model.safetensors")
    engine.close()


def test_what_is_not_trained_can_be_left_out(tmp_path: Path) -> None:
    batches = numbers(4, 8, 32)
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))
    losses = train(engine, optimizer, batches[:2])
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with open_checkpoint(tmp_path) as found:
        assert "frozen.weight" not in found.weights and "head.weight" in found.weights
    losses += train(engine, optimizer, batches[2:])
    engine.close()
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))  # with the same frozen weights
    engine.load_checkpoint(tmp_path)
    assert train(engine, optimizer, batches[2:]) == losses[2:]
    engine.close()


PROGRAM = """
import sys
from pathlib import Path
import torch
from tests.engine.saved_runs import Noisy, engine_for, train
from tests.engine.test_training import MIB, numbers
from tests.engine.training import settings
folder, spool, stop = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
engine, optimizer = engine_for(
    Noisy, settings(precision="bf16", host=MIB // 4, disk=spool, chunk=3000, accumulation=2)
)
if (folder / "latest").exists():
    engine.load_checkpoint(folder)
batches = numbers(stop, 8, 32)
while engine.micro_steps < stop:
    train(engine, optimizer, batches[engine.micro_steps : engine.micro_steps + 1])
    tag, odd = f"micro{engine.micro_steps}", engine.micro_steps % 2 == 1
    engine.save_checkpoint(folder, tag, keep=2, asynchronous=odd)
    print(engine.micro_steps, flush=True)
engine.wait_for_checkpoint()
torch.save({k: v for k, v in engine.state_dict().items()}, folder / "final.pt")
"""


def test_new_processes_that_are_killed_at_random_reach_the_same_bits(tmp_path: Path) -> None:
    stop, draw = 16, random.Random(1)
    how = settings(precision="bf16", chunk=3000, accumulation=2)
    _, expected = through(Noisy, how, numbers(stop, 8, 32))
    folder, kills = tmp_path / "ckpt", 0
    for attempt in range(8):
        command = [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path), str(stop)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if attempt < 2:
            for _ in range(draw.randint(2, 5)):
                process.stdout.readline()
            time.sleep(draw.uniform(0, 0.1))
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.stdout.read()
        if process.wait() == 0:
            break
    assert kills == 2 and (folder / "final.pt").exists()
    found = torch.load(folder / "final.pt", weights_only=True)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
