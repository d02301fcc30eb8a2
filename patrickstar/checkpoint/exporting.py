"""The weights of a checkpoint as files that other programs load.

`export_weights` writes `model.safetensors`, or shards and their index, and with a `config.json` a
folder for Hugging Face's `from_pretrained`. Weights are taken in the precision they were trained
in, or converted; fp32 values come from the master weights where there are some. Tensors go from
file to file in blocks, so the memory that takes does not depend on the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.checkpoint import Checkpoint, open_checkpoint, publish_weights
from patrickstar.checkpoint.manifest import NAME as MANIFEST
from patrickstar.checkpoint.paths import read_small
from patrickstar.checkpoint.shards import SHARD_BYTES, TensorSet
from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.errors import CheckpointError

_MASTER = "master/"
_CONFIG = "config.json"
_LONGEST_CONFIG = 8 << 20
_BLOCK = 4 << 20  # elements

Names = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, str]]
"""From the shapes of a checkpoint's weights by name to the names that they are exported under."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where it is.
        names: the tensors.
        nbytes: their bytes.
        left_out: weights of the checkpoint that are not among them.
        has_config: whether there is a config.json.
    """

    folder: Path
    names: list[str]
    nbytes: int
    left_out: list[str]
    has_config: bool


def export_weights(
    source: Path,
    target: Path,
    tag: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    rename: Names | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the weights of the checkpoint `source/tag`, or of the latest, into the folder `target`.

    Args:
        dtype: of floating-point weights; None keeps what they were trained in.
        config: what becomes config.json; the checkpoint's own, if it has one, where not given.
        rename: chooses weights and their new names; all under their own where not given.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the disk failed.
    """
    if (target / MANIFEST).exists():
        raise CheckpointError(
            f"{str(target)!r} is a checkpoint itself, which exporting into it would damage; "
            "choose another folder"
        )
    with open_checkpoint(source, tag) as checkpoint:
        weights = checkpoint.weights
        shapes = {name: weights[name].shape for name in weights.names()}
        renamed = {name: name for name in shapes} if rename is None else rename(shapes)
        sources = [
            _source(checkpoint, name, new, dtype) for name, new in renamed.items() if name in shapes
        ]
        config = _own_config(checkpoint) if config is None else config
        files = {} if config is None else {_CONFIG: _config_file(config, sources)}
        publish_weights(target, "model", sources, files, shard_bytes)
    return Exported(
        target,
        [made.name for made in sources],
        sum(made.nbytes for made in sources),
        [name for name in shapes if name not in renamed],
        bool(files),
    )


def names_for(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, Collection[str]],
    what: str,
) -> dict[str, str]:
    """Under which names of a model the weights of a checkpoint belong.

    A checkpoint of a model inside another one has a prefix in front of all its names; it is found
    and taken off.

    Args:
        shapes: of the weights in the checkpoint, by name.
        expected: of the model's parameters and persistent buffers, by name.
        aliases: for a tied weight all of its names; one of them is enough.
        what: the model, for messages.

    Raises:
        CheckpointError: the checkpoint lacks a weight, or has one of another shape.
    """

    def lacking(prefix: str) -> list[str]:
        return [
            name
            for name in expected
            if not any(prefix + alias in shapes for alias in aliases.get(name, (name,)))
        ]

    prefixes = {""} | {
        name.removesuffix(wanted)
        for wanted in list(expected)[:1]
        for name in shapes
        if name.endswith("." + wanted)
    }
    prefix = min(sorted(prefixes), key=lambda p: len(lacking(p)), default="")
    missing = lacking(prefix)
    made = {prefix + name: name for name in expected if prefix + name in shapes}
    wrong = [
        f"{old!r} has shape {list(shapes[old])}, not {list(expected[new])}"
        for old, new in made.items()
        if tuple(shapes[old]) != tuple(expected[new])
    ]
    if missing or wrong:
        lost = [f"it has no weight {name!r}" for name in missing]
        raise CheckpointError(
            f"the checkpoint is not one of {what}: {'; '.join((lost + wrong)[:8])[:2000]}"
            f"{f' and {len(lost + wrong) - 8} more' if len(lost + wrong) > 8 else ''}"
        )
    return made


def _source(checkpoint: Checkpoint, name: str, new: str, dtype: torch.dtype | None) -> TensorSource:
    weights: TensorSet = checkpoint.weights
    stored, tensors, key = weights[name], weights, name
    kind = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    wider = kind.itemsize > stored.dtype.itemsize
    if wider and _MASTER + name in checkpoint.optimizer:
        tensors, key = checkpoint.optimizer, _MASTER + name

    def parts() -> Iterator[torch.Tensor]:
        for start in range(0, stored.numel, _BLOCK):
            block = torch.empty(min(_BLOCK, stored.numel - start), dtype=kind)
            tensors.read_into(key, block, start)
            yield block

    return TensorSource(new, kind, tuple(stored.shape), parts)


def _own_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config.json that a checkpoint of a Hugging Face model has."""
    path = checkpoint.path / _CONFIG
    if not path.exists():
        return None
    try:
        content = json.loads(read_small(path, _LONGEST_CONFIG))
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is no JSON ({error})") from error
    return content if isinstance(content, dict) else None


def _config_file(config: Mapping[str, Any], sources: list[TensorSource]) -> bytes:
    """`config` with the precision of the weights in it, which `from_pretrained` goes by."""
    kinds = {made.dtype for made in sources if made.dtype.is_floating_point}
    content = {key: value for key, value in config.items() if key != "torch_dtype"}
    if len(kinds) == 1:
        content["dtype"] = str(kinds.pop()).removeprefix("torch.")
    return (json.dumps(content, indent=2) + "\n").encode()
