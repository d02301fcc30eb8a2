"""Keys that DeepSpeed itself has removed by 0.19.8, and refuses.

They stand in many configs that people still have, often turned off, which is no reason to refuse.
"""

from __future__ import annotations

from typing import Any

from patrickstar.config.key import UNSET, Key, Status, rejected
from patrickstar.config.types import Bool

_GONE = "DeepSpeed has removed it; "


def _section(path: str, meaning: str, instead: str) -> Key:
    return Key(
        path,
        Status.REJECTED,
        UNSET,
        meaning,
        f"{_GONE}{instead}",
        Any,
        (False, None, {}),
        section=True,
        switch=("enabled", True),
        free=True,
    )


OTHER_KEYS: tuple[Key, ...] = (
    _section("amp", "mixed precision by Apex", "use `fp16`, `bf16` or `torch_autocast`"),
    _section(
        "elasticity",
        "batch sizes for a varying number of ranks",
        "set the batch sizes; a checkpoint resumes on any number of ranks",
    ),
    _section("nebula", "write checkpoints with Nebula", "leave it out"),
    _section("compression_training", "train a compressed model", "leave it out"),
    _section("quantize_training", "mixture of quantisation", "leave it out"),
    _section("eigenvalue", "eigenvalues for that", "leave it out"),
    _section(
        "sparse_attention", "sparse attention kernels", "use attention that the model brings along"
    ),
    _section(
        "curriculum_learning",
        "shorter sequences first",
        "order the samples in a `torch.utils.data.Sampler` of your own",
    ),
    _section("progressive_layer_drop", "drop layers at random", "leave it out"),
    rejected(
        "graph_harvesting", Bool, UNSET, "CUDA graphs", f"{_GONE}leave it out", harmless=(False,)
    ),
    rejected(
        "sparse_gradients",
        Bool,
        UNSET,
        "reduce gradients of embeddings sparsely",
        f"{_GONE}leave it out",
        harmless=(False,),
    ),
)
