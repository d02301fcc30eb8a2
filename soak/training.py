"""A training run from plain values, and everything of it that there is to compare."""

from __future__ import annotations

import hashlib
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import patrickstar
from patrickstar.engine.engine import Engine
from soak.models import Spec

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-4},
    "Adagrad": {"lr": 1e-3},
    "Lamb": {"lr": 1e-3},
    "Muon": {"lr": 1e-3},
}


def config_for(
    optimizer: str, precision: str, accumulation: int = 1, clipping: float = 0.0
) -> dict[str, Any]:
    """A config without budgets."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": optimizer, "params": dict(OPTIMIZERS[optimizer])},
        "patrickstar": {"device": "cpu"},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 12
    return config


def update_in_backward(config: dict[str, Any], *others: dict[str, Any]) -> None:
    """Have `config` update in the backward if its precision can; take from all what forbids it."""
    if "fp16" in config:
        return
    for one in (config, *others):
        one["gradient_clipping"] = 0.0
        if "bf16" in one:
            one["bf16"]["check_grad_overflow"] = False
    config["patrickstar"]["update_in_backward"] = True


def start(spec: Spec, config: dict[str, Any]) -> tuple[Engine, Any]:
    """An engine whose model has the weights of seed 0."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return patrickstar.initialize_engine(model_provider=spec.build, config=config)


def one_step(engine: Engine, optimizer: Any, batch: dict[str, torch.Tensor]) -> str:
    """The loss, exact to the bit."""
    loss = engine(**batch)
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()).hex()


def fingerprint(engine: Engine) -> str:
    """A hash of every weight and buffer."""
    found = hashlib.sha256()
    for name, value in engine.state_dict().items():
        found.update(name.encode())
        flat = value.detach().contiguous().flatten()
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        del flat, value
    return found.hexdigest()


def warm_up(folder: Path) -> None:
    """Import and set up what the first run of a process does, so that forks start with it.

    Raises:
        RuntimeError: threads were left; a fork would lack them.
    """
    spec = Spec("layers", 32, 2, 2)
    for precision in ("fp32", "bf16", "fp16"):
        for optimizer in OPTIMIZERS:
            config = config_for(optimizer, precision, 1, 0.5)
            config["patrickstar"]["memory"] = {"host": 1 << 20, "disk": {"path": str(folder)}}
            engine, steps = start(spec, config)
            for batch in spec.batches(3):
                one_step(engine, steps, batch)
            engine.close()
    if threading.active_count() > 1:
        raise RuntimeError(f"threads are left: {threading.enumerate()}")
