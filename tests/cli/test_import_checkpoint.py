"""`patrickstar import-checkpoint`: runs of DeepSpeed's, begun by DeepSpeed 0.19.8 itself, go on.

`resumed.json` beside each stored checkpoint has the losses that DeepSpeed gives when it goes on
from there, with two processes; see `tests/checkpoint/make_deepspeed_checkpoints.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import patrickstar
from patrickstar.cli import app

from ..checkpoint.make_deepspeed_checkpoints import KINDS, Small, batch_after

STORED = Path(__file__).parents[1] / "checkpoint" / "deepspeed"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["import-checkpoint", *map(str, arguments)])


def groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in module.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def losses_from(folder: Path, precision: str, steps: int) -> list[float]:
    """Of a run of ours that goes on from `folder`; two micro-batches stand for two processes."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    engine, _ = patrickstar.initialize_engine(Small, config, param_groups=groups)
    engine.load_checkpoint(folder)
    losses = []
    for step in range(steps):
        both = []
        for rank in range(2):
            loss = engine(batch_after(step, rank))
            engine.backward(loss)
            engine.step()
            both.append(loss.item())
        losses.append(sum(both) / 2)
    engine.close()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_the_losses_that_deepspeed_gives(kind: str, tmp_path: Path) -> None:
    done = run(STORED / kind, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    expected = json.loads((STORED / kind / "resumed.json").read_text())
    stage, precision, *_ = KINDS[kind]
    found = losses_from(tmp_path, precision, len(expected))
    # Stage 3 adds the bias after its product, which in bf16 rounds once more.
    bound = 1e-6 if precision == "fp32" else 4e-3 if stage == 3 else 2e-4
    assert found == pytest.approx(expected, rel=bound)
    assert max(found) - min(found) > 0.1, "these losses tell nothing"


def test_what_was_done_is_said_in_json(tmp_path: Path) -> None:
    done = run(STORED / "zero2-bf16", "--output", tmp_path, "--json")
    found = json.loads(done.stdout)
    assert found.pop("bytes") > 2000
    assert found == {
        "checkpoint": str(tmp_path / "it"),
        "global_steps": 3,
        "skipped_steps": 0,
        "optimizer": "AdamW",
        "parameters": 4,
        "loss_scale": None,
        "scheduler": "WarmupLR",
        "not_taken_over": [],
    }


def test_the_folder_of_one_checkpoint_will_do(tmp_path: Path) -> None:
    assert run(STORED / "zero1-fp32" / "it", "--output", tmp_path).exit_code == 0
    assert (tmp_path / "latest").read_text() == "it\n"


def test_nothing_is_written_over_least_of_all_the_checkpoint_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(STORED / "zero1-fp32", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for arguments in ((folder, "--output", folder), (folder / "it", "--output", folder)):
        done = run(*arguments)
        assert done.exit_code == 1
        assert "exists already" in done.stderr and str(folder / "it") in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        ("missing", 2, "does not exist"),
        ("empty", 1, "no file 'latest'"),
        ("ours", 1, "only checkpoints of stage 1, 2 and 3"),
        ("tag", 1, "there is no checkpoint 'other'"),
        ("nvme", 1, "save_16bit_model gives the weights"),
    ],
)
def test_what_cannot_be_read_is_told(kind: str, code: int, says: str, tmp_path: Path) -> None:
    folder, more = tmp_path / kind, []
    if kind == "empty":
        folder.mkdir()
    elif kind == "ours":
        assert run(STORED / "zero1-fp32", "--output", folder).exit_code == 0
    elif kind == "tag":
        shutil.copytree(STORED / "zero1-fp32", folder)
        more = ["--tag", "other"]
    elif kind == "nvme":
        shutil.copytree(STORED / "zero3-fp32", folder)
        (folder / "it" / "offloaded_tensors").mkdir()
    done = run(folder, *more, "--output", tmp_path / "out")
    assert done.exit_code == code
    assert says in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_code_in_a_checkpoint_is_not_run_but_named(tmp_path: Path) -> None:
    shutil.copytree(STORED / "zero1-fp32", tmp_path / "c")
    path = tmp_path / "c/it/mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "client": print}, path)
    done = run(tmp_path / "c", "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "print" in done.stderr and str(path) in done.stderr


def test_examples_are_in_the_help() -> None:
    assert "patrickstar import-checkpoint runs/ds --output runs/ps" in run("--help").stdout
