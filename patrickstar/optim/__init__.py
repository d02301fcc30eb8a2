"""Optimizer mathematics on flat tensors: update rules, clipping, loss scale, schedules."""

from patrickstar.optim.adam import Adam, AdamW
from patrickstar.optim.clip import (
    BlockSums,
    GradNorm,
    combine_norms,
    deepspeed_clip_coef,
    torch_clip_coef,
)
from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec, UpdateRule

__all__ = [
    "Adam",
    "AdamW",
    "BlockSums",
    "GradNorm",
    "GradScale",
    "Hyper",
    "Layout",
    "Run",
    "Scratch",
    "Segment",
    "StateSpec",
    "UpdateRule",
    "combine_norms",
    "deepspeed_clip_coef",
    "torch_clip_coef",
]
