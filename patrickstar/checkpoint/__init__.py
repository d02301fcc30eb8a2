"""Checkpoints: a format of safetensors files and one JSON, usable without the engine."""

from patrickstar.checkpoint.checkpoint import (
    Checkpoint,
    open_checkpoint,
    publish_weights,
    write_checkpoint,
)
from patrickstar.checkpoint.folder import has_latest
from patrickstar.checkpoint.nearest import misused, nothing_there
from patrickstar.checkpoint.paths import check_name
from patrickstar.checkpoint.plain import decode, encode
from patrickstar.checkpoint.rng import rng_state, set_rng_state
from patrickstar.checkpoint.shards import SHARD_BYTES, TensorSet, open_weights, write_shards
from patrickstar.checkpoint.tensor_file import TensorFile, TensorSource, write_tensor_file

__all__ = [
    "SHARD_BYTES",
    "Checkpoint",
    "TensorFile",
    "TensorSet",
    "TensorSource",
    "check_name",
    "decode",
    "encode",
    "has_latest",
    "misused",
    "nothing_there",
    "open_checkpoint",
    "open_weights",
    "publish_weights",
    "rng_state",
    "set_rng_state",
    "write_checkpoint",
    "write_shards",
    "write_tensor_file",
]
