"""What autograd saves while an engine's model runs."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import patrickstar


def test_a_graph_that_is_dropped_without_a_backward_frees_its_memory() -> None:
    """The results of sigmoid and tanh are what they save."""
    engine, _ = patrickstar.initialize_engine(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Tanh()),
        {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}},
    )
    gc.disable()
    try:
        result = engine(torch.randn(4, 8))
        memory = weakref.ref(result.untyped_storage())
        del result
        assert memory() is None
    finally:
        gc.enable()
        engine.close()
