"""Optimizer mathematics on flat tensors: update rules, clipping, loss scale, schedules."""

from patrickstar.optim.adagrad import Adagrad
from patrickstar.optim.adam import Adam, AdamW
from patrickstar.optim.clip import (
    BlockSums,
    GradNorm,
    combine_norms,
    deepspeed_clip_coef,
    torch_clip_coef,
)
from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.lion import Lion
from patrickstar.optim.sgd import SGD
from patrickstar.optim.torch_rule import TorchRule
from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec, UpdateRule

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BlockSums",
    "GradNorm",
    "GradScale",
    "Hyper",
    "Layout",
    "Lion",
    "Run",
    "Scratch",
    "Segment",
    "StateSpec",
    "TorchRule",
    "UpdateRule",
    "combine_norms",
    "deepspeed_clip_coef",
    "torch_clip_coef",
]
