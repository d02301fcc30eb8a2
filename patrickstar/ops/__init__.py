"""`deepspeed.ops`: DeepSpeed's optimizer classes, as names for our rules."""

from patrickstar.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
