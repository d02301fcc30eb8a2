"""What is loaded is read once by the ranks of a host together, not once by each of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from patrickstar.checkpoint.tensor_file import TensorFile
from patrickstar.zero import GatheredParameters
from tests.engine.data_parallel import Case, gpt, micro_batches, open_run, own_rows
from tests.rank_pool import RankPool


def save(rank: int, size: int, folder: Path) -> None:
    engine, optimizer = open_run(rank, size, Case(3), str(folder))
    rows = own_rows(micro_batches(Case(steps=1))[0], rank, size)
    engine.backward(engine(rows, rows.roll(-1, 1)))
    optimizer.step()
    engine.save_checkpoint(folder)
    engine.close()


def load(rank: int, size: int, folder: Path) -> tuple[int, int]:
    """Bytes that this rank read of tensors, and those that a rank keeps of the whole state."""
    read_into, read = TensorFile.read_into, [0]

    def counted(self: TensorFile, stored: Any, target: torch.Tensor, start: int = 0) -> None:
        read[0] += target.nbytes
        read_into(self, stored, target, start)

    with tempfile.TemporaryDirectory() as spool:
        engine, _ = open_run(rank, size, Case(3), spool)
        TensorFile.read_into = counted  # type: ignore[method-assign]
        try:
            engine.load_checkpoint(folder)
        finally:
            TensorFile.read_into = read_into  # type: ignore[method-assign]
        weights = sum(parameter.nbytes for parameter in engine.parameters())
        engine.close()
    return read[0], 3 * weights  # in fp32: weights and two moments


def test_ranks_read_a_checkpoint_once_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, 2, tmp_path)
    (one, whole), (other, _) = ranks.run(load, 2, tmp_path)
    assert one + other == pytest.approx(whole, rel=0.02)
    assert one == pytest.approx(other, rel=0.2)


def load_on_the_first(rank: int, size: int, path: Path) -> dict[str, torch.Tensor]:
    """Weights of a file that the other rank never opens."""
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = open_run(rank, size, Case(3, "bf16"), folder)
        there = torch.load(path, mmap=True, weights_only=True) if rank == 0 else None
        for name, parameter in engine.named_parameters():
            with GatheredParameters(parameter, modifier_rank=0):
                if there is not None:
                    parameter.data.copy_(there[name])
        found = {name: weight.clone() for name, weight in engine.state_dict().items()}
        engine.close()
    return found


def test_the_first_rank_alone_can_read_weights_for_all(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    module = gpt()
    torch.save(module.state_dict(), tmp_path / "weights")
    for found in ranks.run(load_on_the_first, 2, tmp_path / "weights"):
        for name, parameter in module.named_parameters():
            assert torch.equal(found[name], parameter.bfloat16()), name
