"""A whole checkpoint: weights, optimizer tensors, and everything else, in one folder.

    write_checkpoint(Path("runs"), "global_step10", weights, optimizer, state, keep=3)
    with open_checkpoint(Path("runs")) as checkpoint:
        checkpoint.weights.read_into("layer.weight", tensor)

Nothing here knows of modules, optimizers or chunks. Opening verifies every file before anything of
it is used, and keeps the files open, so what is read later is what was verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from patrickstar.checkpoint import folder as folders
from patrickstar.checkpoint.manifest import NAME, Manifest, read_manifest, write_manifest
from patrickstar.checkpoint.paths import opened, write_new
from patrickstar.checkpoint.record import record_of, verify
from patrickstar.checkpoint.shards import SHARD_BYTES, TensorSet, write_shards
from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.errors import CheckpointError

WEIGHTS, OPTIMIZER = "model", "optimizer"


def write_checkpoint(
    folder: Path,
    tag: str,
    weights: Sequence[TensorSource],
    optimizer: Sequence[TensorSource],
    state: dict[str, Any],
    *,
    extra_files: Mapping[str, bytes] | None = None,
    keep: int | None = None,
    latest: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the checkpoint `folder/tag` and make it the latest; see `checkpoint.folder`.

    Args:
        state: JSON; what belongs in it is up to the caller.
        extra_files: small files that go along, such as the model's config.json.
        keep: how many checkpoints the folder has at most afterwards; None keeps all.
        latest: whether it becomes the latest.
        shard_bytes: the longest file of tensors, in bytes, unless one tensor is longer.

    Returns:
        the folder of the checkpoint.
    """
    with folders.new_checkpoint(folder, tag, keep, latest=latest) as temporary:
        records = write_shards(temporary, WEIGHTS, weights, shard_bytes)
        records |= write_shards(temporary, OPTIMIZER, optimizer, shard_bytes)
        for name, data in (extra_files or {}).items():
            write_new(temporary / name, data)
            records[name] = record_of(data)
        write_manifest(temporary, Manifest(folders.next_sequence(folder), records, state))
    return folder / tag


def publish_weights(
    folder: Path,
    stem: str,
    weights: Sequence[TensorSource],
    extra_files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights into a folder that may have other files: `stem.safetensors`, or shards.

    Written beside, and renamed when complete, file by file, the index last. Other `stem` files of
    safetensors that were there are removed then.

    Raises:
        CheckpointError: the disk is full or failed.
    """
    with folders.beside(folder, stem) as temporary:
        records = write_shards(temporary, stem, weights, shard_bytes)
        index, single = f"{stem}.safetensors.index.json", f"{stem}.safetensors"
        names = [name for name in records if name != index]
        if len(names) == 1:
            (temporary / names.pop()).rename(temporary / single)
            (temporary / index).unlink()
            names, index = [single], ""
        for name, data in (extra_files or {}).items():
            write_new(temporary / name, data)
            names.append(name)
        folders.move_files(temporary, folder, [*names, index] if index else names)
        if index:
            (folder / single).unlink(missing_ok=True)
        else:
            (folder / f"{stem}.safetensors.index.json").unlink(missing_ok=True)


class Checkpoint:
    """An open, verified checkpoint. A context that closes its files.

    Attributes:
        path: its folder.
        state: the JSON that it was written with.
        weights: the model's tensors by name.
        optimizer: the optimizer's tensors by name.
    """

    def __init__(self, path: Path, *, verified: bool = True) -> None:
        self.path = path
        with ExitStack() as stack:
            manifest = read_manifest(path)
            self.state = manifest.state
            self.weights = stack.enter_context(TensorSet(path, _shards(manifest, WEIGHTS)))
            self.optimizer = stack.enter_context(TensorSet(path, _shards(manifest, OPTIMIZER)))
            if verified:
                self._verify(manifest)
            self._open = stack.pop_all()

    def _verify(self, manifest: Manifest) -> None:
        files = {f.path.name: f for f in (*self.weights.files, *self.optimizer.files)}
        for name, record in manifest.files.items():
            if name in files:
                files[name].verify(record)
            else:
                with opened(self.path / name) as file:
                    verify(file, self.path / name, record)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()


def open_checkpoint(folder: Path, tag: str | None = None, *, verified: bool = True) -> Checkpoint:
    """Open and verify the checkpoint `tag` of `folder`, or the latest.

    Args:
        verified: compare checksums, for which all of it is read; without it somebody else has.

    Raises:
        CheckpointError: there is none, or a file of it is missing, damaged or truncated.
    """
    path = folders.find(folder, tag)
    if not (path / NAME).exists() and any(path.glob("*_states.pt")):
        raise CheckpointError(
            f"{str(path)!r} is a checkpoint of DeepSpeed's; take it over first with "
            f"`patrickstar import-checkpoint {folder} --tag {path.name} --output FOLDER`"
        )
    return Checkpoint(path, verified=verified)


def _shards(manifest: Manifest, stem: str) -> list[str]:
    """The files `stem-00001-of-0000N.safetensors`; all of them, or it is an error."""
    found = sorted(n for n in manifest.files if n.startswith(f"{stem}-") and n.endswith("tensors"))
    expected = [f"{stem}-{i:05d}-of-{len(found):05d}.safetensors" for i in range(1, len(found) + 1)]
    if found != expected:
        raise CheckpointError(f"state.json names {found[:5]} as the files of {stem!r}; some miss")
    return found
