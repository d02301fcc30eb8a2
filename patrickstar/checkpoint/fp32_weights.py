"""The fp32 weights of a checkpoint, as a plain state dict in memory.

A run in 16 bits keeps fp32 master weights beside the weights; where a checkpoint has a master it is
what counts. Buffers and frozen weights come as they were saved, in fp32.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.checkpoint import open_checkpoint
from patrickstar.checkpoint.fields import field
from patrickstar.errors import CheckpointError

_MASTER = "master/"


def fp32_weights(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint `checkpoint_dir/tag`, or of the latest, by all their names.

    Args:
        exclude_frozen_parameters: leave out parameters that no optimizer trains.
        lazy_mode: accepted; the tensors are read at once.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    with open_checkpoint(Path(checkpoint_dir), tag) as checkpoint:
        weights, masters = checkpoint.weights, checkpoint.optimizer
        parameters: dict[str, Any] = field(checkpoint.state, "parameters", dict)
        found = {}
        for name in weights.names():
            master = _MASTER + name in masters
            if exclude_frozen_parameters and name in parameters and not master:
                states = any(key.endswith(f"/{name}") for key in masters.names())
                if not states:
                    continue
            stored = weights[name]
            wide = torch.float32 if stored.dtype.is_floating_point else stored.dtype
            tensor = torch.empty(stored.shape, dtype=wide)
            if master:
                masters.read_into(_MASTER + name, tensor)
            else:
                weights.read_into(name, tensor)
            found[name] = tensor
        tied = checkpoint.state.get("tied", {})  # not in checkpoints of earlier versions
        if not isinstance(tied, dict):
            raise CheckpointError(f"'tied' in the state of {str(checkpoint.path)!r} is no object")
        for name, stored_as in tied.items():
            if isinstance(stored_as, str) and stored_as in found:
                found[name] = found[stored_as]
        return found


def load_fp32_weights(
    model: torch.nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> torch.nn.Module:
    """Load what `fp32_weights` finds into `model`; names it lacks stay as they are."""
    model.load_state_dict(fp32_weights(checkpoint_dir, tag), strict=False)
    return model
