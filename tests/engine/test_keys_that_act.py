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


class Mixed(nn.Module):
    """12 x 8 weights of a linear layer with 12 biases, and 10 x 12 of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.other = nn.Linear(8, 12), nn.Embedding(10, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.out(x) + self.other(torch.arange(4))).float().square().mean()


def average(
    rank: int, size: int, stage: int, classes: list[str] | None
) -> tuple[int, list[torch.Tensor]]:
    """Bytes of gradients that a step hands to the network, and the means."""
    torch.manual_seed(0)
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": classes},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 128},
    }
    engine, *_ = patrickstar.initialize(model=Mixed(), config=given)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x))
    assert engine.communicator is not None
    sent = engine.communicator.counters.snapshot()["reduce-scatter"].payload_bytes
    found = [parameter.grad.clone() for parameter in engine.parameters()]
    engine.close()
    return sent, found


LINEAR, OTHER = 128, 128  # elements of their chunks


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "classes, nbytes",
    [
        (None, 2 * LINEAR + 4 * OTHER),
        (["torch.nn.Linear"], 2 * LINEAR + 4 * OTHER),
        (["torch.nn.modules.sparse.Embedding"], 4 * LINEAR + 2 * OTHER),
        ([], 4 * (LINEAR + OTHER)),
    ],
)
def test_gradients_of_safe_modules_travel_in_the_precision_of_autocast(
    stage: int, classes: list[str] | None, nbytes: int, ranks: RankPool
) -> None:
    torch.manual_seed(0)
    plain = Mixed()
    for rank in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(x) / 2
        loss.backward()
    for sent, means in ranks.run(average, 2, stage, classes):
        assert sent == nbytes
        for mean, parameter in zip(means, plain.parameters(), strict=True):
            assert mean.dtype is torch.float32
            torch.testing.assert_close(mean, parameter.grad, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("name", ["Linear", "torch.nn.Linea", "torch.nn.functional.linear"])
def test_a_safe_module_that_is_none_is_refused(name: str) -> None:
    autocast = {"enabled": True, "lower_precision_safe_modules": [name]}
    with pytest.raises(ConfigError, match=f"lower_precision_safe_modules: '{name}'"):
        patrickstar.initialize_engine(nn.Linear(4, 1), {"torch_autocast": autocast})


def predivided(
    rank: int, size: int, stage: int, keys: dict[str, Any], exact: bool
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "patrickstar": {"deepspeed_exact": exact},
        **keys,
    }
    engine, *_ = patrickstar.initialize(model=Mixed(), config=given)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x))
    found = [parameter.grad.clone() for parameter in engine.parameters()]
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "keys",
    [
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 4.0},
        {"prescale_gradients": True},
    ],
    ids=lambda keys: "-".join(f"{name}-{value}" for name, value in keys.items()),
)
def test_dividing_before_the_reduction_changes_no_mean_unless_deepspeed_is_reproduced(
    stage: int, keys: dict[str, Any], ranks: RankPool
) -> None:
    """Its stage 3 divides twice where the factor is the number of ranks."""
    expected = ranks.run(predivided, 2, stage, {}, False)[0]
    twice = stage == 3 and keys.get("gradient_predivide_factor") == 2.0
    for exact in (False, True):
        for found in ranks.run(predivided, 2, stage, keys, exact):
            for ours, mean in zip(found, expected, strict=True):
                assert torch.equal(ours, mean / 2 if twice and exact else mean)
