"""Hugging Face Accelerate over an engine: `Accelerator` with budgets.

    from patrickstar.integrations.accelerate import Accelerator

    accelerator = Accelerator(config={"patrickstar": {"memory": {"host": "8GiB"}}})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

Everything else in a script stays: `backward`, `accumulate`, `clip_grad_norm_`, `save_state`,
`load_state`, `unwrap_model`. A ready model is moved into chunks by `prepare`, and the formula and
the groups of its optimizer are taken over. A model that does not fit in memory is built by
`patrickstar.initialize_engine`, whose engine and optimizer `prepare` takes just as well.

Accelerate counts the micro-batches and divides the loss, so the engine is told of no accumulation.
`mixed_precision` becomes the engine's: weights in 16 bits with master weights in 32, not autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import nn

from patrickstar.api import initialize
from patrickstar.engine.client_optimizer import scheduler_for
from patrickstar.engine.engine import Engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import ConfigError
from patrickstar.integrations.settings import Config, merged, read_config

_FOLDER = "patrickstar"  # of the engine's checkpoint, beside Accelerate's files


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An `accelerate.Accelerator` whose model and optimizer live in chunks.

    Args:
        config: a dict or the path of a JSON file, as for `patrickstar.initialize_engine`. Its
            `gradient_accumulation_steps` and precision are Accelerate's if not given there.
        mixed_precision: "no", "bf16" or "fp16".
        kwargs: of `accelerate.Accelerator`.

    Raises:
        ConfigError: `config` and the other arguments contradict each other.
    """

    def __init__(
        self,
        *,
        config: Config | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        raw = read_config(config)
        steps = raw.pop("gradient_accumulation_steps", None)
        steps = None if steps == "auto" else steps
        if gradient_accumulation_steps is None:
            gradient_accumulation_steps = 1 if steps is None else int(steps)
        elif steps is not None and steps != gradient_accumulation_steps:
            raise ConfigError(
                f"gradient_accumulation_steps is {gradient_accumulation_steps} for the Accelerator "
                f"and {steps} in its config; give it once"
            )
        self.engine: Engine | None = None
        self._models: list[Any]
        self._optimizers: list[Any]
        self._config = merged(raw, mixed_precision or "no")
        super().__init__(
            mixed_precision="no",
            gradient_accumulation_steps=gradient_accumulation_steps,
            **kwargs,
        )

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As Accelerate's; a model and its optimizer come back as the engine and its optimizer.

        Raises:
            ConfigError: a second model, or a model without its optimizer.
        """
        objects = list(args)
        models = [o for o in objects if isinstance(o, nn.Module)]
        if models:
            self._start(models, objects)
        return super().prepare(*objects, device_placement=device_placement)

    def _start(self, models: list[nn.Module], objects: list[Any]) -> None:
        """Replace the model and what belongs to it, in place, by the engine and its parts."""
        if len(models) > 1:
            raise ConfigError(
                f"prepare was given {len(models)} models; an Accelerator of PatrickStar has one. "
                "Make one Accelerator for each, or put them into one nn.Module"
            )
        model = models[0]
        if isinstance(model, Engine):
            self.adopt(model)
            return
        optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        if len(optimizers) != 1:
            raise ConfigError(
                f"prepare was given a model and {len(optimizers)} optimizers; give the model "
                "together with its one optimizer: prepare(model, optimizer, ...)"
            )
        engine, chunked, _, _ = initialize(
            model=model, optimizer=optimizers[0], config=dict(self._config)
        )
        self.adopt(engine)
        for index, given in enumerate(objects):
            if given is model:
                objects[index] = engine
            elif given is optimizers[0]:
                objects[index] = chunked
            elif getattr(given, "optimizer", None) is optimizers[0]:
                objects[index] = scheduler_for(given, chunked)

    def adopt(self, engine: Engine) -> None:
        """Use an engine that is there already.

        Raises:
            ConfigError: there is another one.
        """
        if self.engine not in (None, engine):
            raise ConfigError(
                "this Accelerator has a model already; make another Accelerator for another model"
            )
        if engine.accumulation_steps != 1:
            raise ConfigError(
                f"the engine was made with gradient_accumulation_steps="
                f"{engine.accumulation_steps}, but Accelerate counts micro-batches itself: give "
                "it to the Accelerator and leave it out of the engine's config"
            )
        self.engine = engine

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The engine is on its device and in its precision already, and needs no wrapper."""
        if self.engine is not None and model in (self.engine, self.engine.module):
            if self.engine not in self._models:
                self._models.append(self.engine)
            return self.engine
        found: nn.Module = super().prepare_model(model, *args, **kwargs)
        return found

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        if isinstance(optimizer, ChunkedOptimizer):
            device_placement = False  # its state is where the budgets say
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    # Training

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The engine's backward of `loss`, divided by the accumulation steps."""
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        kwargs.pop("learning_rate", None)
        if kwargs.get("create_graph"):
            raise ConfigError("create_graph: gradients in chunks have no graph of their own")
        loss = loss / self.gradient_accumulation_steps
        keeps_graph = bool(kwargs.get("retain_graph"))
        self.engine.backward(loss, retain_graph=keeps_graph, last=self.sync_gradients)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """The norm of the gradients; the coming step multiplies them by the clip factor.

        For the 2-norm over all parameters nothing moves for it: gradients were measured when they
        came, and are clipped where the update reads them.
        """
        if self.engine is None or norm_type != 2 or not self.sync_gradients:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        missing = {id(p) for p in self.engine.parameters() if p.requires_grad}
        missing -= {id(p) for p in given}
        if missing:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        assert self.engine.optimizer is not None
        return self.engine.optimizer.clip_grad_norm_(max_norm)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step found gradients that are not finite, and made no update."""
        if self.engine is None:
            return bool(super().optimizer_step_was_skipped)
        return self.engine.global_steps > 0 and not self.engine.was_step_applied()

    # The model and its state

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if isinstance(model, Engine):
            return model.module
        found: nn.Module = super().unwrap_model(model, *args, **kwargs)
        return found

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if self.engine is not None and model in (self.engine, self.engine.module):
            return self.engine.state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; the engine's part is the checkpoint `patrickstar` in the folder."""

        def save(models: Any, weights: Any, folder: str) -> None:
            if self.engine is not None:
                self.engine.save_checkpoint(folder, tag=_FOLDER, save_latest=False)

        with self._without_engine(), _registered(self.register_save_state_pre_hook(save)):
            return super().save_state(output_dir, *args, **kwargs)

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """As Accelerate's, for folders that `save_state` has written."""

        def load(models: Any, folder: str) -> None:
            if self.engine is not None and (Path(folder) / _FOLDER).is_dir():
                self.engine.load_checkpoint(folder, tag=_FOLDER)

        with self._without_engine(), _registered(self.register_load_state_pre_hook(load)):
            super().load_state(input_dir, *args, **kwargs)

    @contextmanager
    def _without_engine(self) -> Iterator[None]:
        """Accelerate's own saving sees the rest; what the engine has would be copied whole."""
        models, optimizers = self._models, self._optimizers
        self._models = [m for m in models if m is not self.engine]
        self._optimizers = [o for o in optimizers if not isinstance(o.optimizer, ChunkedOptimizer)]
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers


@contextmanager
def _registered(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


__all__ = ["Accelerator"]
