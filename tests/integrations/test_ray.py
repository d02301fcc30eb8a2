"""Ray Train's real TorchTrainer: two workers, sharded chunks, and the losses of one process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from ..test_readme import ROOT, execute


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed"
)
def test_workers_of_ray_train_to_the_losses_of_one_process(tmp_path: Path) -> None:
    workers = execute(ROOT / "examples" / "ray_train.py", tmp_path)
    assert workers.returncode == 0, workers.stderr
    alone = execute(
        ROOT / "examples" / "train_on_several_ranks.py", tmp_path, str(tmp_path / "run")
    )
    assert alone.returncode == 0, alone.stderr
    losses = [
        dict(re.findall(r"step (\d+)  loss ([\d.]+)", text.stdout)) for text in (workers, alone)
    ]
    assert len(losses[0]) == 12 and losses[0].keys() == losses[1].keys()
    for step, loss in losses[0].items():
        assert float(loss) == pytest.approx(float(losses[1][step]), abs=2e-3)
