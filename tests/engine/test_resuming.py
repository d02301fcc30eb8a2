"""A checkpoint that does not fit is refused, with every difference, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.checkpoint.manifest import NAME, Manifest, read_manifest, write_manifest
from patrickstar.engine.initialize import make_engine
from patrickstar.errors import CheckpointError
from patrickstar.optim import SGD, DynamicLossScale

from .saved_runs import Noisy, Reader, assert_same, engine_for, everything, train
from .test_training import numbers
from .training import settings


class Another(Noisy):
    """`Noisy` with a weight less, one more, and one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        del self.never
        self.extra = nn.Parameter(torch.zeros(2))
        self.seldom = nn.Linear(32, 31)


def test_every_difference_of_the_model_is_named_in_one_error(tmp_path: Path) -> None:
    engine, _ = engine_for(Noisy, settings(chunk=5000))
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine, _ = make_engine(Another, settings(chunk=5000))
    before = everything(engine)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(tmp_path)
    for part in (
        "it has no weight 'extra'",
        "this model has no weight 'never'",
        "'seldom.weight' has shape [32, 32], in this model [31, 32]",
        "'seldom.bias' has shape [32], in this model [31]",
    ):
        assert part in str(error.value)
    assert_same(everything(engine), before)
    engine.close()


def test_another_optimizer_is_refused_unless_its_states_are_left_out(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))
    train(engine, optimizer, numbers(2, 8, 32))
    engine.save_checkpoint(tmp_path)
    saved = engine.state_dict()["head.weight"].clone()
    engine.close()
    how = settings(chunk=5000, rule=SGD(), hyper={"lr": 1e-2})
    engine, _ = make_engine(Noisy, how)
    with pytest.raises(CheckpointError, match=r"'AdamW', this run's is 'SGD'; load with load_opt"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert torch.equal(engine.state_dict()["head.weight"], saved)
    assert engine.global_steps == 2
    engine.close()


def test_weights_alone_leave_everything_else_as_it_is(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))
    train(engine, optimizer, numbers(2, 8, 32))
    engine.save_checkpoint(tmp_path)
    saved = engine.state_dict()["head.weight"].clone()
    train(engine, optimizer, numbers(1, 8, 32))
    before = everything(engine)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    after = everything(engine)
    engine.close()
    assert torch.equal(after["head.weight"], saved)
    for key in before:
        if " of " in key or key in ("global_steps", "lr"):
            assert torch.equal(torch.as_tensor(after[key]), torch.as_tensor(before[key])), key


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    engine, _ = engine_for(Noisy, settings(chunk=5000))
    engine.save_checkpoint(tmp_path)
    engine.close()

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        trained = [p for p in module.parameters() if p.requires_grad]
        return [{"params": trained[:3], "lr": 0.5}, {"params": trained[3:]}]

    engine, _ = make_engine(Noisy, settings(chunk=5000), groups)
    with pytest.raises(CheckpointError, match="1 parameter groups, this run 2"):
        engine.load_checkpoint(tmp_path)
    engine.close()


def test_another_accumulation_begins_anew_but_not_in_the_middle(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=5000, accumulation=2))
    train(engine, optimizer, numbers(4, 8, 32))
    engine.save_checkpoint(tmp_path, "complete")
    train(engine, optimizer, numbers(1, 8, 32))
    engine.save_checkpoint(tmp_path, "middle")
    engine.close()
    engine, _ = make_engine(Noisy, settings(chunk=5000, accumulation=3))
    engine.load_checkpoint(tmp_path, "complete")
    assert engine.global_steps == 2 and engine.accumulation_is_complete()
    with pytest.raises(CheckpointError, match="in the middle of an accumulation over 2"):
        engine.load_checkpoint(tmp_path, "middle")
    engine.close()


def test_client_state_that_cannot_be_kept_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))
    with pytest.raises(CheckpointError, match=r"client_state\['model'\] is a"):
        engine.save_checkpoint(tmp_path, client_state={"model": engine})
    assert not list(tmp_path.iterdir())
    train(engine, optimizer, numbers(1, 8, 32))
    engine.close()


def test_a_folder_without_checkpoints_starts_anew_with_a_warning(tmp_path: Path) -> None:
    engine, _ = engine_for(Noisy, settings(chunk=5000))
    with pytest.warns(UserWarning, match="training starts anew"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(CheckpointError, match="there is no checkpoint 'best'"):
        engine.load_checkpoint(tmp_path, "best")
    engine.close()


def test_a_hostile_state_json_is_refused_before_anything_changes(tmp_path: Path) -> None:
    engine, optimizer = engine_for(Noisy, settings(chunk=5000))
    train(engine, optimizer, numbers(2, 8, 32))
    engine.save_checkpoint(tmp_path, "it")
    before = everything(engine)
    good = read_manifest(tmp_path / "it")
    changes: list[tuple[str, Any]] = [
        ("client", 3),
        ("client", {"$map": [[1]]}),
        ("counters", {}),
        ("counters", {**good.state["counters"], "global_steps": -1}),
        ("counters", {**good.state["counters"], "micro_steps": True}),
        ("optimizer", []),
        ("optimizer", {"type": "AdamW", "groups": [3]}),
        ("optimizer", {"type": "AdamW", "groups": [{"lr": "much"}]}),
        ("optimizer", {"type": "AdamW", "groups": [{"betas": [2, 3]}]}),
        ("parameters", {"head.weight": 3}),
        ("parameters", {"head.weight": [{"rows": 1}]}),
        ("parameters", {"never": [{"rows": 7, "step": 2, "started": True, "gradient": True}]}),
    ]
    for key, value in changes:
        (tmp_path / "it" / NAME).unlink()
        hostile = Manifest(1, good.files, {**good.state, key: value})
        write_manifest(tmp_path / "it", hostile)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(tmp_path, "it")
        assert "replaced in part" not in str(error.value), key
    assert_same(everything(engine), before)
    for key, value in (("loss_scale", 3), ("rng", [{}]), ("rng", [{"cpu": 1}]), ("data", {})):
        (tmp_path / "it" / NAME).unlink()
        write_manifest(tmp_path / "it", Manifest(1, good.files, {**good.state, key: value}))
        engine.data_position = Reader()
        engine._precision.scaler = DynamicLossScale()
        with pytest.raises(CheckpointError, match="replaced in part"):
            engine.load_checkpoint(tmp_path, "it")
    engine.close()
