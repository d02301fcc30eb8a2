"""Optimizer mathematics on flat tensors: update rules, clipping, loss scale, schedules."""

from patrickstar.optim.adagrad import Adagrad
from patrickstar.optim.adam import Adam, AdamW
from patrickstar.optim.chunked import ChunkedAdamW
from patrickstar.optim.clip import (
    BlockSums,
    GradNorm,
    combine_norms,
    deepspeed_clip_coef,
    torch_clip_coef,
)
from patrickstar.optim.lamb import Lamb
from patrickstar.optim.layout import Layout, Segment
from patrickstar.optim.lion import Lion
from patrickstar.optim.loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleError,
    StaticLossScale,
    make_loss_scale,
)
from patrickstar.optim.muon import Muon, is_muon_parameter
from patrickstar.optim.named import muon_hyper, rule_named, schedule_named
from patrickstar.optim.one_cycle import OneCycle
from patrickstar.optim.schedule import (
    LRRangeTest,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from patrickstar.optim.sgd import SGD
from patrickstar.optim.torch_rule import TorchRule
from patrickstar.optim.update import GradScale, Hyper, Run, Scratch, StateSpec, UpdateRule
from patrickstar.optim.widened import Widened

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BlockSums",
    "ChunkedAdamW",
    "DynamicLossScale",
    "GradNorm",
    "GradScale",
    "Hyper",
    "LRRangeTest",
    "Lamb",
    "Layout",
    "Lion",
    "LossScale",
    "LossScaleError",
    "Muon",
    "OneCycle",
    "Run",
    "Schedule",
    "Scratch",
    "Segment",
    "StateSpec",
    "StaticLossScale",
    "TorchRule",
    "UpdateRule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "Widened",
    "combine_norms",
    "deepspeed_clip_coef",
    "is_muon_parameter",
    "make_loss_scale",
    "muon_hyper",
    "rule_named",
    "schedule_named",
    "torch_clip_coef",
]
