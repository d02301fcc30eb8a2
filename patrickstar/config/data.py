"""What is trained on: the data loader, and DeepSpeed's data efficiency library."""

from __future__ import annotations

from typing import Any

from patrickstar.config.key import Key, Status, accepted, within
from patrickstar.config.types import Bool, Int, Str

_SAMPLING = "data_sampling"
_CURRICULUM = f"{_SAMPLING}.curriculum_learning"
_BATCHING = f"{_SAMPLING}.dynamic_batching"
_LTD = "data_routing.random_ltd"


def _section(path: str, meaning: str, *, free: bool = False) -> Key:
    return Key(path, Status.REJECTED, {}, meaning, section=True, free=free)


OTHER_KEYS: tuple[Key, ...] = tuple(
    within(
        Key(
            "data_efficiency",
            Status.REJECTED,
            {},
            "choose samples and tokens by difficulty",
            "order the samples in a `torch.utils.data.Sampler` of your own",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "choose"),
            accepted("seed", Int, 1234, "seed of the choice"),
            _section(_SAMPLING, "choose samples"),
            accepted(f"{_SAMPLING}.enabled", Bool, False, "choose samples"),
            accepted(f"{_SAMPLING}.num_epochs", Int, 1000, "epochs"),
            accepted(f"{_SAMPLING}.num_workers", Int, 0, "workers of the data loader"),
            accepted(f"{_SAMPLING}.pin_memory", Bool, False, "page-lock batches"),
            _section(_CURRICULUM, "easy samples first", free=True),
            accepted(f"{_CURRICULUM}.enabled", Bool, False, "easy samples first"),
            accepted(f"{_CURRICULUM}.data_cluster_path", Str, None, "folder of clusters"),
            accepted(f"{_CURRICULUM}.curriculum_metrics", dict[str, Any], None, "difficulties"),
            _section(_BATCHING, "as many samples as there is room for", free=True),
            accepted(f"{_BATCHING}.enabled", Bool, False, "batches of varying size"),
            accepted(f"{_BATCHING}.metrics_path", Str, None, "lengths of samples"),
            accepted(f"{_BATCHING}.lr_scaling_method", Str, "linear", "linear, sqrt or none"),
            accepted(f"{_BATCHING}.min_batch_size", Int, 1, "fewest samples"),
            accepted(f"{_BATCHING}.max_batch_size", Int, None, "most samples"),
            accepted(f"{_BATCHING}.max_tokens", Int, None, "most tokens"),
            accepted(
                f"{_BATCHING}.sequence_picking_order",
                Str,
                "dataloader",
                "random, seqlen or dataloader",
            ),
            accepted(f"{_BATCHING}.verbose", Bool, False, "print batches"),
            _section("data_routing", "choose tokens"),
            accepted("data_routing.enabled", Bool, False, "choose tokens"),
            _section(_LTD, "drop tokens in some layers", free=True),
            accepted(f"{_LTD}.enabled", Bool, False, "drop tokens"),
            accepted(f"{_LTD}.total_layer_num", Int, None, "layers of the model"),
            accepted(f"{_LTD}.random_ltd_layer_num", Int, None, "layers that drop"),
            accepted(f"{_LTD}.random_ltd_layer_id", list[Int], None, "which"),
            accepted(f"{_LTD}.model_mask_name", Str, None, "argument with the mask"),
            accepted(f"{_LTD}.model_type", Str, None, "encoder or decoder"),
            accepted(f"{_LTD}.hidden_state_order", Str, None, "order of dimensions"),
            accepted(f"{_LTD}.random_ltd_schedule", dict[str, Any], None, "how many are dropped"),
            accepted(f"{_LTD}.layer_token_lr_schedule", dict[str, Any], {}, "rate by tokens kept"),
        ),
    )
)
