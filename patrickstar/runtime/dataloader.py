"""`deepspeed.runtime.dataloader`: a loader without end, from `patrickstar.data`."""

from patrickstar.data.repeating import RepeatingLoader

__all__ = ["RepeatingLoader"]
