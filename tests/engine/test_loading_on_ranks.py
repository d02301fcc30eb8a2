"""What is loaded is read once by the ranks of a host together, not once by each of them."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from patrickstar.checkpoint.tensor_file import TensorFile
from patrickstar.comm import CommError
from patrickstar.errors import CheckpointError
from patrickstar.zero import GatheredParameters
from tests.engine.data_parallel import Case, gpt, micro_batches, open_run, own_rows
from tests.rank_pool import RankPool


def save(rank: int, size: int, folder: Path) -> dict[str, torch.Tensor]:
    engine, optimizer = open_run(rank, size, Case(3), str(folder))
    rows = own_rows(micro_batches(Case(steps=1))[0], rank, size)
    engine.backward(engine(rows, rows.roll(-1, 1)))
    optimizer.step()
    engine.save_checkpoint(folder)
    weights = {name: weight.clone() for name, weight in engine.state_dict().items()}
    engine.close()
    return weights


def load(
    rank: int, size: int, folder: Path, stage: int
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Bytes that this rank read of tensors, those of the whole state, and the weights."""
    read_into, read = TensorFile.read_into, [0]

    def counted(self: TensorFile, stored: Any, target: torch.Tensor, start: int = 0) -> None:
        read[0] += target.nbytes
        read_into(self, stored, target, start)

    with tempfile.TemporaryDirectory() as spool:
        engine, _ = open_run(rank, size, Case(stage), spool)
        TensorFile.read_into = counted  # type: ignore[method-assign]
        try:
            engine.load_checkpoint(folder)
        finally:
            TensorFile.read_into = read_into  # type: ignore[method-assign]
        weights = sum(parameter.nbytes for parameter in engine.parameters())
        found = {name: weight.clone() for name, weight in engine.state_dict().items()}
        engine.close()
    return read[0], 3 * weights, found  # in fp32: weights and two moments


def test_ranks_read_a_checkpoint_once_together_at_every_stage(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks.run(save, 2, tmp_path)[0]
    for stage in (0, 1, 3):
        (one, whole, here), (other, _, there) = ranks.run(load, 2, tmp_path, stage)
        assert one + other == pytest.approx(whole, rel=0.02), stage
        assert one == pytest.approx(other, rel=0.2), stage
        for name, weight in saved.items():
            assert torch.equal(here[name], weight) and torch.equal(there[name], weight), name


def load_from_a_bad_disk(rank: int, size: int, folder: Path) -> str:
    """What a rank is told when the disk fails the second one in the middle of the weights."""
    read_into, reads = TensorFile.read_into, [0]

    def failing(self: TensorFile, stored: Any, target: torch.Tensor, start: int = 0) -> None:
        reads[0] += 1
        if rank == 1 and reads[0] == 4:
            raise CheckpointError("the disk failed")
        read_into(self, stored, target, start)

    with tempfile.TemporaryDirectory() as spool:
        engine, _ = open_run(rank, size, Case(1), spool, timeout=5.0)
        TensorFile.read_into = failing  # type: ignore[method-assign]
        try:
            engine.load_checkpoint(folder)
        except (CheckpointError, CommError) as error:
            return str(error)
        finally:
            TensorFile.read_into = read_into  # type: ignore[method-assign]
            dist.barrier()  # this one lives on until the other has been told
            with suppress(CommError):
                engine.close()
    return ""


def test_a_rank_that_cannot_read_its_part_does_not_leave_the_others_waiting(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, 2, tmp_path)
    told, failed = ranks.run(load_from_a_bad_disk, 2, tmp_path)
    assert "the disk failed" in failed and "load a complete checkpoint" in failed
    assert "rank 1" in told and "the disk failed" in told


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


def read_from_disks() -> int:
    """Bytes that the kernel has fetched from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def load_in_the_provider(rank: int, size: int, path: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes from the disk of a rank whose provider reads a file as `from_pretrained` does."""
    fetched = 0

    def provide() -> nn.Module:
        nonlocal fetched
        module = gpt()
        before = read_from_disks()
        module.load_state_dict(load_file(path), strict=False)  # the head is tied
        fetched = read_from_disks() - before
        return module

    if rank == 0:
        forget_pages(path)
    dist.barrier()
    with tempfile.TemporaryDirectory() as folder:
        engine, _ = open_run(rank, size, Case(1), folder, provide)
        found = {name: weight.clone() for name, weight in engine.state_dict().items()}
        engine.close()
    return fetched, found


def forget_pages(path: Path) -> None:
    """Make the kernel drop what it has of a file in memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what came from a disk")
def test_a_file_that_every_rank_maps_comes_from_the_disk_once(
    ranks: RankPool, tmp_path: Path
) -> None:
    module, path = gpt(), tmp_path / "model.safetensors"
    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    save_file(weights, path)
    forget_pages(path)
    before = read_from_disks()
    load_file(path)
    if read_from_disks() - before < path.stat().st_size:
        pytest.skip("this file system has no disk that is counted, or keeps its pages")
    (one, found), (other, _) = ranks.run(load_in_the_provider, 2, path)
    assert path.stat().st_size <= one + other < 1.2 * path.stat().st_size
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
