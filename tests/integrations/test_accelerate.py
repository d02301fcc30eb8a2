"""Accelerate's Accelerator on chunks gives the numbers of an ordinary one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import patrickstar
from patrickstar.errors import ConfigError

from .hugging_face import Texts, llama

pytest.importorskip("transformers", reason="needs the extra [hf]")
accelerate = pytest.importorskip("accelerate", reason="needs the extra [hf]")

from patrickstar.integrations.accelerate import Accelerator  # noqa: E402

BUDGET = 340 << 10


def config(folder: Path) -> dict[str, Any]:
    return {"patrickstar": {"memory": {"host": BUDGET, "disk": {"path": str(folder / "spool")}}}}


def prepared(accelerator: Any) -> tuple[Any, ...]:
    model = llama()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2,
        fused=True,  # as the engine computes it, and as the Trainer does
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    loader = torch.utils.data.DataLoader(Texts(16), batch_size=2)
    made: tuple[Any, ...] = accelerator.prepare(model, optimizer, loader, schedule)
    return made


def loop(
    accelerator: Any, parts: tuple[Any, ...], batches: slice = slice(None), clip: float = 0.5
) -> list[Any]:
    """A training loop as Accelerate's documentation has it; returns losses, norms and rates."""
    model, optimizer, loader, schedule = parts
    told = []
    for batch in list(loader)[batches]:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), clip))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        told.append((loss.item(), norm, schedule.get_last_lr()))
    return told


def weights(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_a_loop_gives_the_bits_of_an_ordinary_one_inside_the_budget(tmp_path: Path) -> None:
    ordinary = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    theirs = prepared(ordinary)
    expected = loop(ordinary, theirs)
    ours = Accelerator(config=config(tmp_path), cpu=True, gradient_accumulation_steps=2)
    parts = prepared(ours)
    assert loop(ours, parts) == expected
    assert_same(weights(ours, parts[0]), weights(ordinary, theirs[0]))
    host = parts[0].memory_report().tiers["host"]
    assert host.peak <= BUDGET < 0.7 * 16 * sum(p.numel() for p in parts[0].parameters())
    assert ours.unwrap_model(parts[0]) is parts[0].module
    parts[0].close()


@pytest.mark.parametrize("given", [{}, {"gradient_clipping": "auto"}])
def test_a_loop_that_does_not_clip_is_not_clipped(given: dict[str, Any], tmp_path: Path) -> None:
    ordinary = accelerate.Accelerator(cpu=True)
    theirs = prepared(ordinary)
    ours = Accelerator(config={**config(tmp_path), **given}, cpu=True)
    parts = prepared(ours)
    for accelerator, (model, optimizer, loader, _) in ((ordinary, theirs), (ours, parts)):
        accelerator.backward(model(**next(iter(loader))).loss * 1000)
        optimizer.step()
    assert_same(weights(ours, parts[0]), weights(ordinary, theirs[0]))
    parts[0].close()


def test_updates_in_the_backward_wait_for_the_last_micro_batch(tmp_path: Path) -> None:
    weights_of, told = [], []
    for early in (True, False):
        how = config(tmp_path)
        how["patrickstar"]["update_in_backward"] = early
        ours = Accelerator(config=how, cpu=True, gradient_accumulation_steps=2)
        parts = prepared(ours)
        told.append(loop(ours, parts, clip=float("inf")))
        weights_of.append(weights(ours, parts[0]))
        parts[0].close()
    assert told[0] == told[1]
    assert_same(*weights_of)


def test_saved_state_resumes_with_the_same_bits(tmp_path: Path) -> None:
    first = Accelerator(config=config(tmp_path), cpu=True)
    parts = prepared(first)
    loop(first, parts, slice(0, 3))
    first.save_state(tmp_path / "saved")
    expected = loop(first, parts, slice(3, 6)), weights(first, parts[0])
    parts[0].close()
    second = Accelerator(config=config(tmp_path), cpu=True)
    parts = prepared(second)
    second.load_state(tmp_path / "saved")
    assert loop(second, parts, slice(3, 6)) == expected[0]
    assert_same(weights(second, parts[0]), expected[1])
    parts[0].close()


def test_an_engine_made_before_is_prepared_as_it_is(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    engine, optimizer = patrickstar.initialize_engine(llama, config(tmp_path))
    model, prepared_optimizer = accelerator.prepare(engine, optimizer)
    assert model is engine and prepared_optimizer.optimizer is optimizer
    batch = {k: v[None] for k, v in Texts()[0].items()}
    before = model(**batch).loss
    accelerator.backward(before)
    prepared_optimizer.step()
    with torch.no_grad():
        assert model(**batch).loss < before
    engine.close()


def test_mixed_precision_is_the_engines(tmp_path: Path) -> None:
    accelerator = Accelerator(config=config(tmp_path), cpu=True, mixed_precision="bf16")
    model, *_ = prepared(accelerator)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.bfloat16_enabled() and accelerator.mixed_precision == "no"
    model.close()


def test_a_model_without_its_optimizer_and_a_second_model_are_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(config=config(tmp_path), cpu=True)
    with pytest.raises(ConfigError, match="together with its one optimizer"):
        accelerator.prepare(llama())
    model, *_ = prepared(accelerator)
    with pytest.raises(ConfigError, match="another Accelerator"):
        prepared(accelerator)
    model.close()


def test_accumulation_given_twice_must_agree() -> None:
    with pytest.raises(ConfigError, match="give it once"):
        Accelerator(config={"gradient_accumulation_steps": 4}, gradient_accumulation_steps=2)
