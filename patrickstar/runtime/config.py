"""`deepspeed.runtime.config`: the error of a config under DeepSpeed's name."""

from patrickstar.errors import ConfigError as DeepSpeedConfigError

__all__ = ["DeepSpeedConfigError"]
