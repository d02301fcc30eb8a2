"""A table of embeddings bigger than its memory budget, without any `nn.Module`.

65,536 keys of 64 numbers are 16 MiB; the table gets 4 MiB of memory, and the rest of it lies in a
file that is gone when the program ends. Keys are used by popularity, as words are, so most lookups
find their chunk in memory.

    python examples/embedding_table.py
"""

from __future__ import annotations

import tempfile

import torch

from patrickstar.memory import Access, ChunkManager, CpuTier, DiskTier, Lru, Spool, Use

KEYS, WIDTH, ROWS = 65_536, 64, 1024  # ROWS of the table make a chunk


class EmbeddingTable:
    """Rows of `WIDTH` numbers by key, in chunks that come and go."""

    def __init__(self, keys: int, manager: ChunkManager) -> None:
        self._manager = manager
        self._chunks = [
            manager.create(ROWS * WIDTH, torch.float32, "table") for _ in range(-(-keys // ROWS))
        ]

    def lookup(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of `keys`, shape `[len(keys), WIDTH]`."""
        out = torch.empty(len(keys), WIDTH)
        for block in (keys // ROWS).unique().tolist():
            here = (keys // ROWS == block).nonzero().squeeze(1)
            chunk = self._chunks[block]
            with self._manager.use([Use(chunk.id, Access.READ)]):
                out[here] = self._manager.tensor(chunk).view(ROWS, WIDTH)[keys[here] % ROWS]
        return out

    def add(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `rows` to the rows of `keys`; a key that comes twice gets both."""
        for block in (keys // ROWS).unique().tolist():
            here = (keys // ROWS == block).nonzero().squeeze(1)
            chunk = self._chunks[block]
            with self._manager.use([Use(chunk.id, Access.UPDATE)]):
                table = self._manager.tensor(chunk).view(ROWS, WIDTH)
                table.index_add_(0, keys[here] % ROWS, rows[here])


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tiers = [CpuTier("host", 4 << 20), DiskTier("disk", Spool(folder))]
        manager = ChunkManager(tiers, policy=Lru(), plan=False)
        table = EmbeddingTable(KEYS, manager)
        counts = torch.zeros(KEYS)
        for _ in range(200):
            # Squares of uniform numbers crowd near zero: a few keys are popular.
            keys = (torch.rand(32, generator=generator) ** 4 * KEYS).long()
            table.add(keys, torch.ones(len(keys), WIDTH))
            counts.index_add_(0, keys, torch.ones(len(keys)))
        every = torch.arange(KEYS)
        found = torch.cat([table.lookup(part) for part in every.split(4096)])
        assert torch.equal(found, counts[:, None].expand(KEYS, WIDTH)), "a row was lost"
        report = manager.report()
        print(f"table    {KEYS * WIDTH * 4 >> 20} MiB")
        print(f"host     {report.tiers['host'].peak / 2**20:.1f} MiB at most, of 4")
        for way, nbytes in report.moved.items():
            print(f"{way}  {nbytes / 2**20:.1f} MiB")
        manager.close()


if __name__ == "__main__":
    main()
