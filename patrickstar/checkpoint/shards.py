"""Many tensors over several safetensors files, in the way that Hugging Face lays them out.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json
        {"metadata": {"total_size": bytes}, "weight_map": {name: file}}

A shard holds whole tensors, in the order they come in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch

from patrickstar.checkpoint.header import StoredTensor
from patrickstar.checkpoint.paths import check_name, read_small, write_new
from patrickstar.checkpoint.record import FileRecord, record_of
from patrickstar.checkpoint.tensor_file import TensorFile, TensorSource, write_tensor_file
from patrickstar.errors import CheckpointError

SHARD_BYTES = 5 << 30
METADATA = {"format": "pt"}
"""What Hugging Face asks for in a file's header; it says that the tensors came from PyTorch."""
_MOST_IN_A_SHARD = 100_000
_LONGEST_INDEX = 64 << 20


def split(sources: Sequence[TensorSource], shard_bytes: int) -> list[list[TensorSource]]:
    """Consecutive sources of at most `shard_bytes` bytes together, or one larger one."""
    shards: list[list[TensorSource]] = []
    room = 0
    for source in sources:
        if not shards or source.nbytes > room or len(shards[-1]) >= _MOST_IN_A_SHARD:
            shards.append([])
            room = shard_bytes
        shards[-1].append(source)
        room -= source.nbytes
    return shards


def write_shards(
    folder: Path, stem: str, sources: Sequence[TensorSource], shard_bytes: int = SHARD_BYTES
) -> dict[str, FileRecord]:
    """Write `sources` to new files `stem-*.safetensors` and their index.

    Returns:
        the record of every file, by name.
    """
    records = {
        name: write_tensor_file(folder / name, shard, METADATA)
        for name, shard in named_shards(stem, sources, shard_bytes).items()
    }
    records.update(write_index(folder, stem, sources, shard_bytes))
    return records


def named_shards(
    stem: str, sources: Sequence[TensorSource], shard_bytes: int
) -> dict[str, list[TensorSource]]:
    """What belongs in which file, by the file's name."""
    shards = split(sources, shard_bytes)
    return {
        f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def write_index(
    folder: Path, stem: str, sources: Sequence[TensorSource], shard_bytes: int
) -> dict[str, FileRecord]:
    """Write the index of `sources`, and return its record."""
    shards = named_shards(stem, sources, shard_bytes)
    weight_map = {source.name: name for name, shard in shards.items() for source in shard}
    total = sum(source.nbytes for source in sources)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    data = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
    name = f"{stem}.safetensors.index.json"
    write_new(folder / name, data)
    return {name: record_of(data)}


class TensorSet:
    """The tensors of several open files, by name. A context that closes the files.

    Raises:
        CheckpointError: a file is missing or damaged, or two of them hold the same name.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self.files: list[TensorFile] = []
        self._places: dict[str, tuple[TensorFile, StoredTensor]] = {}
        try:
            for name in files:
                file = TensorFile(folder / check_name(name, f"a file named in {str(folder)!r}"))
                self.files.append(file)
                for stored in file.tensors.values():
                    if stored.name in self._places:
                        other = self._places[stored.name][0].path.name
                        raise CheckpointError(
                            f"tensor {stored.name[:80]!r} is in {other!r} and in {name!r} of "
                            f"{str(folder)!r}"
                        )
                    self._places[stored.name] = (file, stored)
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> StoredTensor:
        return self._places[name][1]

    def names(self) -> list[str]:
        return list(self._places)

    def read_into(self, name: str, target: torch.Tensor, start: int = 0) -> None:
        """Fill `target` with elements of tensor `name`, from number `start` on."""
        file, stored = self._places[name]
        file.read_into(stored, target, start)

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` in fresh memory."""
        file, stored = self._places[name]
        return file.read(stored)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __enter__(self) -> TensorSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_weights(folder: Path) -> TensorSet:
    """The weights in a folder as Hugging Face writes it: one file, or an index and shards.

    Raises:
        CheckpointError: there are none, or the index and the files disagree.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return TensorSet(folder, ["model.safetensors"])
    where = str(index)
    try:
        content = json.loads(read_small(index, _LONGEST_INDEX))
        weight_map = content["weight_map"]
        named = {
            name: check_name(file, f"a file in {where!r}") for name, file in weight_map.items()
        }
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where!r} is no index of safetensors files") from error
    tensors = TensorSet(folder, list(dict.fromkeys(named.values())))
    lost = [name for name in named if name not in tensors]
    if lost:
        tensors.close()
        raise CheckpointError(
            f"{where!r} names {len(lost)} tensors that no file has: {', '.join(lost[:5])[:300]}"
        )
    return tensors
