"""Keys of DeepSpeed's that are small: what each of them changes."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.config import load_config
from patrickstar.engine import initialize
from patrickstar.engine.from_config import settings_from
from patrickstar.errors import CheckpointError, ConfigError
from tests.rank_pool import RankPool


class Look(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize(
    "auto_cast, seen", [(None, torch.float16), (True, torch.float16), (False, torch.float32)]
)
def test_inputs_are_cast_to_fp16_unless_auto_cast_is_false(
    auto_cast: bool | None, seen: torch.dtype
) -> None:
    given = {} if auto_cast is None else {"auto_cast": auto_cast}
    engine, _ = patrickstar.initialize_engine(Look(4, 1), {"fp16": {"enabled": True, **given}})
    engine(torch.ones(2, 4))
    assert engine.module.seen is seen
    engine.close()


@pytest.mark.parametrize("block", ["offload_param", "offload_optimizer"])
@pytest.mark.parametrize("pin", [True, False])
def test_host_memory_is_page_locked_unless_pin_memory_is_false(
    block: str, pin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = {"stage": 1, block: {"device": "cpu", "pin_memory": pin}}
    settings = settings_from(load_config({"zero_optimization": zero}))
    locked: list[int] = []

    def lock(address: int, nbytes: int) -> Any:
        locked.append(nbytes)
        return lambda: None

    monkeypatch.setattr(initialize, "page_lock", lambda device: lock)
    settings = replace(settings, device=torch.device("cpu"), device_budget=1 << 20)
    tiers = initialize.make_tiers(settings)
    tiers[1].take(0, 4096, zero=True)
    assert locked == ([4096] if pin else [])
    for tier in tiers:
        tier.close()


def save_as(rank: int, size: int, folder: str, validation: str, unlike: bool) -> Any:
    torch.manual_seed(0)
    engine, _ = patrickstar.initialize_engine(
        nn.Linear(4, 1), {"checkpoint": {"tag_validation": validation}}
    )
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.save_checkpoint(folder, tag=f"tag{rank if unlike else 0}")
        return [str(w.message) for w in caught if "different tags" in str(w.message)]
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("validation", ["Warn", "Ignore", "Fail"])
def test_ranks_that_save_under_different_tags_are_told(ranks: RankPool, validation: str) -> None:
    folder = tempfile.mkdtemp()
    answers = ranks.run(save_as, 2, folder, validation, True)
    saved = sorted(path.name for path in Path(folder).glob("tag*"))
    if validation == "Fail":
        assert all("(tag0, tag1)" in answer for answer in answers) and saved == []
    else:
        assert saved == ["tag0"]
        told = 1 if validation == "Warn" else 0
        assert [len(answer) for answer in answers] == [told, told]


def test_ranks_that_save_under_one_tag_hear_nothing(ranks: RankPool) -> None:
    assert ranks.run(save_as, 2, tempfile.mkdtemp(), "Fail", False) == [[], []]


def test_torch_autocast_gives_the_numbers_of_a_plain_loop_under_autocast() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    config = {
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "gradient_clipping": 0,
    }
    engine, optimizer = patrickstar.initialize_engine(model, config)
    plain = model()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    other.param_groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"]
    for step in range(4):
        x = torch.full((2, 8), 1.0 + step)
        out = engine(x)
        with torch.autocast("cpu", torch.bfloat16):
            expected = plain(x)
        assert out.dtype is torch.bfloat16 and torch.equal(out, expected)
        engine.backward(out.float().square().mean())
        engine.step()
        expected.float().square().mean().backward()
        other.step()
        other.zero_grad()
    assert next(engine.parameters()).dtype is torch.float32
    engine.close()


def test_torch_autocast_in_fp16_is_refused() -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    with pytest.raises(ConfigError, match="section fp16"):
        patrickstar.initialize_engine(nn.Linear(4, 1), config)
