"""`patrickstar train` on several ranks: batches are dealt out, and the first rank tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import patrickstar
from patrickstar.cli import build_app
from tests.rank_pool import RankPool


def train(rank: int, size: int, folder: Path, stage: int) -> dict[str, Any]:
    config, data = folder / "config.json", folder / "data.txt"
    metrics = folder / f"metrics-{stage}-{size}-{rank}.jsonl"
    command = f"train --config {config} --model gpt-tiny --data {data} --steps 2"
    command += f" --sequence-length 16 --metrics {metrics}"
    told = CliRunner().invoke(build_app(patrickstar.initialize_engine), command.split())
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {
        "code": told.exit_code,
        "out": told.stdout,
        "losses": [json.loads(line)["loss"] for line in lines],
    }


def test_two_ranks_train_on_the_batches_of_one_and_the_first_tells(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "data.txt").write_text("to be or not to be, that is the question. " * 200)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, second = ranks.run(train, 2, tmp_path, 3)
    assert (first["code"], second["code"]) == (0, 0)
    assert second["out"] == "" and second["losses"] == []
    # One rank sees the same sequences as two micro-batches of an accumulation.
    config["gradient_accumulation_steps"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (alone,) = ranks.run(train, 1, tmp_path, 3)
    assert len(first["losses"]) == 2
    for together, one in zip(first["losses"], alone["losses"], strict=True):
        assert abs(together - one) < 1e-5 * one
