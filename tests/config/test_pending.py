"""Keys that nothing acts on yet: they are remarked on, and none is forgotten."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import patrickstar
from patrickstar.config import ConfigWarning, load_config
from patrickstar.config.key import Status
from patrickstar.config.keys import TABLE
from patrickstar.config.pending import ALWAYS

# Read in this package, which resolves them.
RESOLVED = {
    "bf16.enabled",
    "fp16.enabled",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "data_types.param_dtype",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
}


def remarks(config: dict[str, Any], world_size: int = 1) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config(config, world_size=world_size)
    assert all(issubclass(one.category, ConfigWarning) for one in caught)
    return "\n".join(str(one.message) for one in caught)


def at(path: str, value: Any) -> dict[str, Any]:
    config = value
    for name in reversed(path.split(".")):
        config = {name: config}
    return config  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", ALWAYS)
def test_asking_for_what_nothing_acts_on_is_remarked_on(path: str) -> None:
    nothing = ALWAYS[path]
    asking = ("torch.nn.Linear",) if nothing is None else not nothing
    assert f"{path}: nothing acts on it yet" in remarks(at(path, asking), world_size=2)
    assert path not in remarks(at(path, nothing), world_size=2)


def test_defaults_are_not_remarked_on() -> None:
    assert remarks({"zero_optimization": {"offload_param": {"device": "cpu"}}}, world_size=2) == ""


def test_every_honoured_key_is_read_by_something_or_marked() -> None:
    package = Path(patrickstar.__file__).parent
    code = "\n".join(
        file.read_text(encoding="utf-8")
        for file in package.rglob("*.py")
        if file.parent.name != "config"
    )
    unread = {
        path
        for path, key in TABLE.items()
        if key.status is Status.HONOURED
        and not key.section
        and not key.today
        and key.parent not in ("optimizer.params", "scheduler.params")  # taken as a whole
        and not re.search(rf"\.{key.name}\b", code)
    }
    off = {path.removesuffix("enabled") for path in ALWAYS if path.endswith(".enabled")}
    unread = {path for path in unread if not path.startswith(tuple(off))}
    assert unread - ALWAYS.keys() - RESOLVED == set()
