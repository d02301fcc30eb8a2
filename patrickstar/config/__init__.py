"""DeepSpeed's config, and a section of our own, checked and resolved."""

from __future__ import annotations

from patrickstar.config.load import load_config
from patrickstar.config.model import Config
from patrickstar.config.warning import ConfigWarning

__all__ = ["Config", "ConfigWarning", "load_config"]
