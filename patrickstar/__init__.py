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
    from patrickstar import (
        accelerator,
        checkpointing,
        comm,
        ops,
        runtime,
        utils,
        zero,
    )
    from patrickstar.accelerator import get_accelerator
    from patrickstar.activations import offload_activations
    from patrickstar.api import (
        add_config_arguments,
        init_distributed,
        initialize,
        initialize_engine,
    )
    from patrickstar.engine.alone import local_to_rank
    from patrickstar.engine.engine import Engine
    from patrickstar.engine.engine import Engine as DeepSpeedEngine
    from patrickstar.engine.logs import log_dist, logger
    from patrickstar.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        DataError,
        PatrickStarError,
        SpoolError,
    )
    from patrickstar.planning import plan

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeepSpeedEngine",
    "Engine",
    "PatrickStarError",
    "SpoolError",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "initialize_engine",
    "local_to_rank",
    "log_dist",
    "logger",
    "offload_activations",
    "ops",
    "plan",
    "runtime",
    "utils",
    "zero",
]

_MODULES = {"accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero"}
_HOMES = {
    "Engine": "patrickstar.engine.engine",
    "DeepSpeedEngine": "patrickstar.runtime.engine",
    "get_accelerator": "patrickstar.accelerator",
    "local_to_rank": "patrickstar.engine.alone",
    "log_dist": "patrickstar.engine.logs",
    "logger": "patrickstar.engine.logs",
    "plan": "patrickstar.planning",
    "offload_activations": "patrickstar.activations",
} | dict.fromkeys(
    ("add_config_arguments", "init_distributed", "initialize", "initialize_engine"),
    "patrickstar.api",
)
# Names of DeepSpeed's that have no counterpart, and what to do instead.
_ABSENT = {
    "init_inference": "there is no inference engine; use the module itself, under torch.no_grad",
    "InferenceEngine": "there is no inference engine; use the module itself, under torch.no_grad",
    "PipelineModule": "there is no pipeline parallelism; memory budgets make large models fit",
    "PipelineEngine": "there is no pipeline parallelism; memory budgets make large models fit",
    "pipe": "there is no pipeline parallelism; memory budgets make large models fit",
    "moe": "there is no expert parallelism of ours; experts that are ordinary modules work, and "
    "those that you spread over ranks yourself: see docs/several-gpus.md",
    "tp_model_init": "there is no tensor parallelism; memory budgets make large models fit",
    "OnDevice": "use torch.device as a context, or zero.Init",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"patrickstar.{name}")
    if name not in __all__:
        reason = f": {_ABSENT[name]}" if name in _ABSENT else ""
        raise AttributeError(f"module 'patrickstar' has no attribute {name!r}{reason}")
    return getattr(importlib.import_module(_HOMES.get(name, "patrickstar.errors")), name)
