"""Modules of an installed DeepSpeed to compare with; tests skip where there is none."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def deepspeed_module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``deepspeed.<name>``, or skip the test and say why."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    try:
        module = importlib.import_module(f"deepspeed.{name}")
        version = importlib.import_module("deepspeed").__version__
    except ImportError as error:
        pytest.skip(f"DeepSpeed, the oracle of this test, cannot be imported: {error}")
    if not version.strip().startswith("0.19."):
        pytest.skip(f"the formulas are those of DeepSpeed 0.19, but {version} is installed")
    return module
