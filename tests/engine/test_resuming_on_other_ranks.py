"""A checkpoint of four ranks goes on with fewer of them, as if nothing had happened."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.engine.data_parallel import (
    Case,
    Outcome,
    gpt,
    micro_batches,
    one_backward,
    open_run,
    own_rows,
)
from tests.rank_pool import RankPool

STEPS, SAVED_AFTER, SAVED_ON = 4, 2, 4


def go_on(rank: int, size: int, stage: int, folder: Path, saves: bool) -> Outcome:
    """What follows the checkpoint; the ranks that save it go on without an interruption."""
    outcome, case = Outcome(), Case(stage, steps=STEPS, seed=0 if saves else 9)
    batches = micro_batches(case)
    with tempfile.TemporaryDirectory() as spool:
        engine, optimizer = open_run(rank, size, case, spool, lambda: gpt(layers=1))
        if not saves:
            engine.load_checkpoint(folder)
        for step in range(engine.global_steps, STEPS):
            if saves and step == SAVED_AFTER:
                engine.save_checkpoint(folder)
            loss = one_backward(engine, own_rows(batches[step], rank, size), case, last=True)
            optimizer.step()
            optimizer.zero_grad()
            if step >= SAVED_AFTER:
                outcome.losses.append(loss)
                outcome.norms.append(engine.get_global_grad_norm() or 0.0)
        engine.close()
    return outcome


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_of_four_ranks_resumes_on_one_two_and_three_with_the_same_losses(
    stage: int, ranks: RankPool, tmp_path: Path
) -> None:
    expected = ranks.run(go_on, SAVED_ON, stage, tmp_path, True)[0]
    assert len(expected.losses) == STEPS - SAVED_AFTER
    for size in (1, 2, 3):
        for found in ranks.run(go_on, size, stage, tmp_path, False):
            found.assert_close(expected, 1e-6)
