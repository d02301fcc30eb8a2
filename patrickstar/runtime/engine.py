"""`deepspeed.runtime.engine`: the engine under DeepSpeed's name."""

from patrickstar.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
