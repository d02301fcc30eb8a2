"""Lightning on chunks: a strategy for its Trainer.

    from patrickstar.integrations.lightning import PatrickStarStrategy

    strategy = PatrickStarStrategy(config={"patrickstar": {"memory": {"host": "8GiB"}}})
    Trainer(strategy=strategy, max_steps=1000).fit(model, loader)

Importing this module makes the name known too, `Trainer(strategy="patrickstar")`, for those who
set no budget. The LightningModule stays as it is: its `configure_optimizers` says formula, groups
and schedule, the Trainer's arguments say precision, accumulation and clipping. What
`configure_model` builds goes into chunks at once, so it may be larger than memory.

A checkpoint is a folder: the engine's, which is written one chunk at a time, and beside it a small
file with what Lightning keeps. `ModelCheckpoint`, `ckpt_path` and `Trainer.save_checkpoint` work
with it. With `save_weights_only` it is one ordinary file that needs no strategy to be loaded; for
that, the weights are gathered in memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from patrickstar.api import initialize
from patrickstar.checkpoint import rng_state, set_rng_state
from patrickstar.checkpoint.fp32_weights import fp32_weights
from patrickstar.config import load_config
from patrickstar.engine.client_optimizer import scheduler_for
from patrickstar.engine.engine import Engine
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.zero_init import Init
from patrickstar.errors import ConfigError
from patrickstar.integrations.replacing import recover, replacing
from patrickstar.integrations.settings import Config, merged, read_config

_ENGINE, _LIGHTNING = "patrickstar", "lightning.ckpt"  # the two parts of a checkpoint's folder
_TRAINED_BY = "_patrickstar_engine"  # of a module: refers to the engine of its last fit
_PRECISIONS = {
    "32-true": "no",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
}
_INSTEAD = {
    "gradient_accumulation_steps": ((None, "auto", 1), "Trainer(accumulate_grad_batches=...)"),
    "gradient_clipping": ((None, "auto", 0, 0.0), "Trainer(gradient_clip_val=...)"),
    "optimizer": ((None,), "configure_optimizers"),
    "scheduler": ((None,), "configure_optimizers"),
}


class ChunkPrecision(Precision):  # type: ignore[misc]
    """The engine's own precision: weights in 16 bits with master weights in 32, not autocast."""

    def __init__(self, strategy: PatrickStarStrategy, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self._strategy = strategy

    def backward(
        self,
        tensor: torch.Tensor,
        model: LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_overridden("backward", model):
            raise ConfigError(
                f"{type(model).__name__}.backward is overridden, and the backward belongs to the "
                "engine; use the hooks on_before_backward and on_after_backward instead"
            )
        # Who steps by hand may accumulate by hand.
        last = model.automatic_optimization and not model.trainer.fit_loop._should_accumulate()
        self._strategy.started().backward(tensor, last=last, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Nothing moves for it: the coming step multiplies gradients as it reads them."""
        chunked = self._strategy.started().optimizer
        assert chunked is not None
        chunked.clip_grad_norm_(clip_val)


class PatrickStarStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains a LightningModule under memory budgets, in one process.

    Args:
        config: a dict or the path of a JSON file, as for `patrickstar.initialize_engine`. What the
            Trainer and `configure_optimizers` decide is left out of it.
        kwargs: of Lightning's `SingleDeviceStrategy`.

    Attributes:
        engine: while there is one; `engine.memory_report()` tells bytes by tier. It stays after
            `fit`, so that `test` and `predict` are inside the budgets too; `engine.close()` gives
            its memory back.

    Raises:
        ConfigError: `config` contradicts the Trainer, or cannot work.
        BudgetError: when training begins, if a budget is too small.
    """

    strategy_name = "patrickstar"
    optimizers: list[Any]

    def __init__(self, config: Config | None = None, **kwargs: Any) -> None:
        self.engine: Engine | None = None
        self._raw = read_config(config)
        for key, (allowed, instead) in _INSTEAD.items():
            value = self._raw.pop(key, None)
            if value not in allowed:
                raise ConfigError(
                    f"{key} is {value!r} in the config of PatrickStarStrategy, but Lightning "
                    f"decides it: leave it out, and use {instead}"
                )
        self.parallel_devices: list[torch.device] | None = None  # the Trainer says which it has
        self._is_ordinary = True  # the checkpoint that was loaded last
        super().__init__(**kwargs)

    # Where and how

    @property
    def config(self) -> dict[str, Any]:
        """The engine's config, with what the Trainer says."""
        raw = dict(self._raw)
        if isinstance(self.accelerator, CPUAccelerator):
            raw["patrickstar"] = {"device": "cpu", **raw.get("patrickstar", {})}
        return merged(raw, _PRECISIONS[self.precision_plugin.precision])

    @property
    def root_device(self) -> torch.device:
        if self.engine is not None:
            return self.engine.device
        return settings_from(load_config(self.config)).device or torch.device("cpu")

    @property
    def precision_plugin(self) -> Precision:
        """The engine's."""
        plugin = self._precision_plugin
        return plugin if plugin is not None else ChunkPrecision(self, "32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None:  # the Trainer takes one that is there for one that was asked for
            self._precision_plugin = None
            return
        precision = str(plugin.precision)
        if precision not in _PRECISIONS:
            raise ConfigError(
                f"precision={precision!r} is none that the engine has; use one of "
                + ", ".join(map(repr, _PRECISIONS))
            )
        self._precision_plugin = ChunkPrecision(self, precision)

    def setup_environment(self) -> None:
        trainer = self._module().trainer
        processes = trainer.num_nodes * len(self.parallel_devices or [None])
        if max(processes, int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise ConfigError(
                f"the Trainer has {processes} devices; PatrickStarStrategy trains in one process. "
                "Use Trainer(devices=1), or patrickstar.initialize_engine under torchrun"
            )
        super().setup_environment()

    # The model and its optimizer

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Models are built on the CPU, so that their random numbers are the CPU's."""
        with torch.device("cpu"):
            yield

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """`configure_model` builds straight into chunks."""
        module = self._module()
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        builds = fitting and self.engine is None and is_overridden("configure_model", module)
        with Init(config=self.config, enabled=builds):
            yield

    def model_to_device(self) -> None:
        """The engine's tiers say where the model is."""
        if self.engine is None:
            super().model_to_device()

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module()
        if self.engine is not None and self.engine.module is not module:
            self.engine = None
        if trainer.state.fn == TrainerFn.FITTING:
            self.engine = None
            self.setup_optimizers(trainer)
        else:
            self.model_to_device()
        self.model: Any = module if self.engine is None else self.engine
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Any) -> None:
        """Ask the module for its optimizer and schedules, and start the engine with them."""
        super().setup_optimizers(trainer)
        module = self._module()
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], torch.optim.Optimizer):
            raise ConfigError(
                f"configure_optimizers of {type(module).__name__} gives {len(self.optimizers)} "
                "optimizers that can be used; an engine has exactly one torch.optim.Optimizer, "
                "whose parameter groups may differ in everything"
            )
        before = module.__dict__.get(_TRAINED_BY)
        if before is not None and (engine := before()) is not None:
            engine.close()  # which hands the parameters back, and they are the optimizer's
        self.engine, chunked, _, _ = initialize(
            model=module, optimizer=self.optimizers[0], config=self.config
        )
        module.__dict__[_TRAINED_BY] = weakref.ref(self.engine)
        self.optimizers = [chunked]
        for schedule in self.lr_scheduler_configs:
            schedule.scheduler = scheduler_for(schedule.scheduler, chunked)
        module._device = self.engine.device

    def started(self) -> Engine:
        """The engine, of a run that trains."""
        assert self.engine is not None, "no backward comes before fit has set up the engine"
        return self.engine

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # Checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return self._is_ordinary

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: the weights are in the engine's part of the checkpoint."""
        return {} if self.engine is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the states are in the engine's part of the checkpoint."""
        return {} if self.engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write the folder `filepath` whole, or leave what was there."""
        if self.engine is None or "optimizer_states" not in checkpoint:
            if self.engine is not None:
                checkpoint["state_dict"] = self.engine.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with replacing(Path(filepath)) as folder:
            self.engine.save_checkpoint(folder, tag=_ENGINE, save_latest=False)
            file = folder / _LIGHTNING
            self.checkpoint_io.save_checkpoint(checkpoint, file, storage_options=storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What Lightning keeps of a checkpoint; the engine takes its part."""
        folder = Path(checkpoint_path)
        recover(folder)
        self._is_ordinary = not (folder / _LIGHTNING).is_file()
        if self._is_ordinary:
            ordinary: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
            return ordinary
        kept: dict[str, Any] = super().load_checkpoint(folder / _LIGHTNING, weights_only)
        if self.engine is None:
            kept["state_dict"] = fp32_weights(folder, _ENGINE)
            return kept
        fitting = self._module().trainer.state.fn == TrainerFn.FITTING
        random = rng_state()  # Lightning goes on with the random numbers of the process
        self.engine.load_checkpoint(folder, _ENGINE, load_module_only=not fitting)
        set_rng_state(random)
        return kept

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.engine is None:
            super().load_model_state_dict(checkpoint, strict)
        elif self._is_ordinary:
            self.engine.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """Lightning's part is over; the engine stays for what comes after `fit`."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, override=True, description=cls.__name__)


PatrickStarStrategy.register_strategies(StrategyRegistry)

__all__ = ["PatrickStarStrategy"]
