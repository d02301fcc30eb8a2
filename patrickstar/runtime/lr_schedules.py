"""`deepspeed.runtime.lr_schedules`: DeepSpeed's schedules, from `patrickstar.optim`."""

from patrickstar.optim import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
