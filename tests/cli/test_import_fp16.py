"""The loss scale of a DeepSpeed run in fp16 goes on.

DeepSpeed refuses fp16 on a CPU, so a stored checkpoint in bf16 is written anew with the files, the
dtypes and the scaler that fp16 has: the attributes of its `DynamicLossScaler` and `LossScaler`.
"""

from __future__ import annotations

import enum
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import patrickstar
from patrickstar.checkpoint.deepspeed import import_checkpoint
from patrickstar.engine.engine import Engine

from ..checkpoint.make_deepspeed_checkpoints import Small, batch_after
from .test_import_checkpoint import STORED, groups


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Classes under DeepSpeed's names, so that its pickles can be read and written."""

    def made(name: str, base: type = object) -> Any:
        module, _, attribute = name.rpartition(".")
        kind: Any = type(attribute, (base,), {"__module__": module})
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            known = sys.modules.get(path)
            if known is None or getattr(known, "__file__", None) is not None:
                monkeypatch.setitem(sys.modules, path, ModuleType(path))
        setattr(sys.modules[module], attribute, kind)
        return kind

    fragment = made("deepspeed.utils.tensor_fragment.fragment_address")
    stage = enum.IntEnum("ZeroStageEnum", {"none": 0, "one": 1, "two": 2, "three": 3})
    stage.__module__ = "deepspeed.runtime.zero.config"
    made("deepspeed.runtime.zero.config.ZeroStageEnum")
    sys.modules["deepspeed.runtime.zero.config"].ZeroStageEnum = stage  # type: ignore[attr-defined]
    return {
        "fragment_address": fragment,
        "LossScaler": made("deepspeed.runtime.fp16.loss_scaler.LossScaler"),
        "DynamicLossScaler": made("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    }


def in_fp16(folder: Path, scaler: Any, fp16: dict[str, Any]) -> Path:
    shutil.copytree(STORED / "zero2-bf16", folder)
    model = folder / "it" / "mp_rank_00_model_states.pt"
    content = torch.load(model, weights_only=True)
    content["module"] = {
        name: t.half() if t.dtype is torch.bfloat16 else t for name, t in content["module"].items()
    }
    content["ds_config"] = {**content["ds_config"], "bf16": {"enabled": False}, "fp16": fp16}
    torch.save(content, model)
    for path in (folder / "it").glob("bf16_zero_*"):
        content = torch.load(path, weights_only=False)
        content["optimizer_state_dict"]["loss_scaler"] = scaler
        torch.save(content, path.with_name(path.name.removeprefix("bf16_")))
        path.unlink()
    return folder


def going_on(folder: Path, fp16: dict[str, Any]) -> Engine:
    config = {
        "fp16": fp16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    engine, _ = patrickstar.initialize_engine(Small, config, param_groups=groups)
    engine.load_checkpoint(folder)
    return engine


def test_a_dynamic_scale_grows_when_it_would_have_grown(
    theirs: dict[str, Any], tmp_path: Path
) -> None:
    scaler = theirs["DynamicLossScaler"]()
    vars(scaler).update(
        cur_scale=256.0,
        cur_iter=9,
        last_overflow_iter=7,
        scale_factor=2.0,
        scale_window=4,
        min_scale=1,
        delayed_shift=2,
        cur_hysteresis=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.half,
    )
    fp16 = {"enabled": True, "loss_scale_window": 4, "hysteresis": 2}
    import_checkpoint(in_fp16(tmp_path / "c", scaler, fp16), tmp_path / "out")
    engine = going_on(tmp_path / "out", fp16)
    assert engine.loss_scale == 256.0
    assert engine._precision.scaler.state_dict()["cur_hysteresis"] == 1
    scales = []
    for step in range(4):
        engine.backward(engine(batch_after(step, 0)))
        engine.step()
        scales.append(engine.loss_scale)
    # Iterations 9 to 12. DeepSpeed's rule: it grows when iteration - last overflow - 1 is 4.
    assert scales == [256.0, 256.0, 256.0, 512.0] and engine.skipped_steps == 0
    engine.close()


def test_a_static_scale_is_the_one_that_the_run_had(theirs: dict[str, Any], tmp_path: Path) -> None:
    scaler = theirs["LossScaler"]()
    vars(scaler).update(cur_scale=128.0, dtype=torch.half)
    fp16 = {"enabled": True, "loss_scale": 128}
    import_checkpoint(in_fp16(tmp_path / "c", scaler, fp16), tmp_path / "out")
    engine = going_on(tmp_path / "out", fp16)
    assert engine.loss_scale == 128.0
    engine.close()
