"""Models to train out of the box. Ordinary `nn.Module`s that know nothing of the engine."""

from patrickstar.models.gpt import GPT, GPTConfig
from patrickstar.models.presets import PRESETS, preset

__all__ = ["GPT", "PRESETS", "GPTConfig", "preset"]
