"""Lightning's real Trainer on chunks, held against an ordinary Lightning run to the bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar

if importlib.util.find_spec("lightning") is None:
    pytest.skip("the extra `lightning` is not installed", allow_module_level=True)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from patrickstar.integrations.lightning import PatrickStarStrategy

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
WIDTH = 32


class Model(pl.LightningModule):
    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None
        self.losses: list[float] = []
        self.checked: list[float] = []
        if not late:
            self._build()

    def _build(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def configure_model(self) -> None:
        if self.net is None:
            self._build()

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        assert self.net is not None
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self._loss(batch)
        self.checked.append(loss.item())
        self.log("val_loss", loss)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.net is not None
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=3)
        later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, later], milestones=[3])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def loader() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=generator)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, x.roll(1, 1)), batch_size=4
    )


def chunks(folder: Path, *, update_in_backward: bool = False, **config: Any) -> PatrickStarStrategy:
    # The state of the model is 16 bytes for each of 25,000 parameters.
    memory = {"host": "320KiB", "disk": str(folder / "spool")}
    ours = {"memory": memory, "chunk_size": 4096, "update_in_backward": update_in_backward}
    return PatrickStarStrategy(config={"patrickstar": ours, **config})


def trainer(folder: Path, strategy: Any = "auto", **kwargs: Any) -> pl.Trainer:
    given: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "default_root_dir": folder,
        **kwargs,
    }
    return pl.Trainer(strategy=strategy, **given)


def fit(folder: Path, strategy: Any = "auto", model: Model | None = None, **kwargs: Any) -> Model:
    model = Model() if model is None else model
    made = trainer(folder, strategy, **kwargs)
    torch.manual_seed(3)
    made.fit(model, loader(), loader())
    return model


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-true"},
    ],
    ids=lambda arguments: next(iter(arguments), "plain"),
)
def test_losses_are_those_of_an_ordinary_run(tmp_path: Path, arguments: dict[str, Any]) -> None:
    strategy = chunks(tmp_path)
    ours = fit(tmp_path, strategy, **arguments)
    assert strategy.engine is not None
    report = strategy.engine.memory_report()
    strategy.engine.close()
    assert report.moved["host->disk"] > 0
    assert report.tiers["host"].peak <= 320 << 10
    if "precision" in arguments:  # Lightning's has no master weights, so its numbers are others
        assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
        assert ours.losses[-1] < ours.losses[0]
        return
    theirs = fit(tmp_path, **arguments)
    assert ours.losses == theirs.losses
    assert ours.checked == theirs.checked
    for (name, mine), (_, plain) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert torch.equal(mine, plain), name


def test_updates_in_the_backward_wait_for_the_last_micro_batch(tmp_path: Path) -> None:
    found = []
    for early in (True, False):
        strategy = chunks(tmp_path, update_in_backward=early)
        found.append(fit(tmp_path, strategy, accumulate_grad_batches=3))
    assert found[0].losses == found[1].losses


def test_the_name_is_enough_for_a_run_without_budgets(tmp_path: Path) -> None:
    assert fit(tmp_path, "patrickstar").losses == fit(tmp_path).losses


def test_a_model_built_in_configure_model_goes_into_chunks_at_once(tmp_path: Path) -> None:
    strategy = chunks(tmp_path)
    ours = fit(tmp_path, strategy, Model(late=True))
    assert strategy.engine is not None
    assert strategy.engine.memory_report().tiers["host"].peak <= 320 << 10
    assert ours.losses == fit(tmp_path, model=Model(late=True)).losses


def every_epoch(folder: Path) -> dict[str, Any]:
    saved = ModelCheckpoint(folder, save_top_k=-1, save_last=True, save_on_train_epoch_end=True)
    return {"callbacks": [saved], "enable_checkpointing": True, "max_epochs": 1}


def test_checkpoints_of_the_callback_resume_to_the_same_losses(tmp_path: Path) -> None:
    whole = fit(tmp_path)
    first = fit(tmp_path, chunks(tmp_path), **every_epoch(tmp_path / "ours"))
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["epoch=0-step=8.ckpt", "last.ckpt"]
    last = tmp_path / "ours" / "last.ckpt"
    rest = Model()
    trainer(tmp_path, chunks(tmp_path)).fit(rest, loader(), loader(), ckpt_path=last)
    assert first.losses + rest.losses == whole.losses
    assert rest.checked[-8:] == whole.checked[-8:]


def test_an_ordinary_checkpoint_resumes_on_chunks(tmp_path: Path) -> None:
    whole = fit(tmp_path)
    fit(tmp_path, **every_epoch(tmp_path / "plain"))
    last = tmp_path / "plain" / "last.ckpt"
    rest = Model()
    trainer(tmp_path, chunks(tmp_path)).fit(rest, loader(), loader(), ckpt_path=last)
    assert rest.losses == whole.losses[8:]


def test_weights_alone_are_an_ordinary_file(tmp_path: Path) -> None:
    made = trainer(tmp_path, chunks(tmp_path), max_steps=3)
    ours = Model()
    made.fit(ours, loader())
    made.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    loaded = Model.load_from_checkpoint(tmp_path / "weights.ckpt")
    for name, weight in ours.named_parameters():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_the_best_checkpoint_is_tested_and_predicted_with_in_and_outside_of_fit(
    tmp_path: Path,
) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0)
    strategy = chunks(tmp_path)
    made = trainer(
        tmp_path, strategy, max_epochs=9, callbacks=[best, stop], enable_checkpointing=True
    )
    made.fit(Model(), loader(), loader())
    assert made.current_epoch == 2, "stopped early"
    inside = made.test(dataloaders=loader(), ckpt_path="best")
    assert strategy.engine is not None
    strategy.engine.close()
    fresh = trainer(tmp_path, chunks(tmp_path))
    assert fresh.test(Model(), loader(), ckpt_path=best.best_model_path) == inside
    assert len(fresh.predict(Model(), loader(), ckpt_path=best.best_model_path)) == 8


def test_a_second_fit_begins_with_the_weights_of_the_first(tmp_path: Path) -> None:
    def twice(strategy: Callable[[], Any]) -> list[float]:
        model = Model()
        for _ in range(2):
            trainer(tmp_path, strategy(), max_steps=4).fit(model, loader())
        return model.losses

    theirs = twice(lambda: "auto")
    assert twice(lambda: PatrickStarStrategy()) == theirs
    strategy = chunks(tmp_path)
    made, model = trainer(tmp_path, strategy, max_epochs=1), Model()
    made.fit(model, loader())
    made.fit_loop.max_epochs = 2
    made.fit(model, loader())
    assert len(model.losses) == 16


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def test_manual_optimization_works(tmp_path: Path) -> None:
    assert fit(tmp_path, chunks(tmp_path), Manual()).losses == fit(tmp_path, model=Manual()).losses


class OwnBackward(Model):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class TwoOptimizers(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def test_what_cannot_work_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(patrickstar.ConfigError, match="accumulate_grad_batches"):
        chunks(tmp_path, gradient_accumulation_steps=4)
    with pytest.raises(patrickstar.ConfigError, match="configure_optimizers"):
        chunks(tmp_path, optimizer={"type": "AdamW"})
    with pytest.raises(patrickstar.ConfigError, match="on_after_backward"):
        fit(tmp_path, chunks(tmp_path), OwnBackward())
    with pytest.raises(patrickstar.ConfigError, match="gives 2 optimizers"):
        fit(tmp_path, chunks(tmp_path), TwoOptimizers())
    with pytest.raises(patrickstar.ConfigError, match="64-true"):
        trainer(tmp_path, chunks(tmp_path), precision="64-true")
    with pytest.raises(patrickstar.ConfigError, match="one process"):
        fit(tmp_path, chunks(tmp_path), devices=2)


def test_a_checkpoint_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = chunks(tmp_path)
    made = trainer(tmp_path, strategy, max_steps=2)
    made.fit(Model(), loader())
    target = tmp_path / "kept.ckpt"
    made.save_checkpoint(target)
    before = sorted(path.name for path in target.rglob("*"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(strategy.checkpoint_io, "save_checkpoint", full)
    with pytest.raises(OSError, match="no space"):
        made.save_checkpoint(target)
    assert sorted(path.name for path in target.rglob("*")) == before
    assert not list(tmp_path.glob(".kept*"))
