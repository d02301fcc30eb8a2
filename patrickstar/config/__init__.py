"""DeepSpeed's config, and a section of our own: read, checked, resolved and frozen.

``load_config`` turns a dict or a JSON file into a `Config`. What becomes of each key is in one
table, `patrickstar.config.keys.TABLE`, and in ``docs/deepspeed-config.md``, which is made from it.
"""

from patrickstar.config.load import load_config
from patrickstar.config.model import Config
from patrickstar.config.warning import ConfigWarning

__all__ = ["Config", "ConfigWarning", "load_config"]
