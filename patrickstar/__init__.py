"""PatrickStar: train models bigger than the memory they run in.

    model, optimizer = patrickstar.initialize_engine(model_provider=lambda: GPT(), config="ds.json")
    for batch in loader:
        loss = model(batch)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

Two parts live on their own: `patrickstar.memory`, the chunk memory manager, and `patrickstar.comm`,
the chunk communication library. Importing one of them loads nothing else, so the names here are
found when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from patrickstar.api import (
        add_config_arguments,
        init_distributed,
        initialize,
        initialize_engine,
    )
    from patrickstar.engine.engine import Engine
    from patrickstar.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        DataError,
        PatrickStarError,
        SpoolError,
    )

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Engine",
    "PatrickStarError",
    "SpoolError",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "initialize_engine",
]

_HOMES = {"Engine": "patrickstar.engine.engine"} | dict.fromkeys(
    ("add_config_arguments", "init_distributed", "initialize", "initialize_engine"),
    "patrickstar.api",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'patrickstar' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "patrickstar.errors")), name)
