"""Hugging Face's `Trainer` over an engine: one changed import and one argument.

    from patrickstar.integrations.transformers import Trainer

    trainer = Trainer(
        model_init=lambda: AutoModelForCausalLM.from_pretrained("my-model"),
        args=TrainingArguments(...),
        train_dataset=data,
        patrickstar={"memory": {"host": "8GiB", "disk": "/scratch:200GiB"}},
    )

`model_init` is called while every parameter goes straight into a chunk, so the model may be larger
than memory; a ready `model=` is moved into chunks. `TrainingArguments` decide about the optimizer,
its groups, the schedule, accumulation, clipping and precision as they always do. `patrickstar` is
the section of that name, or a whole config (a dict or a JSON file), in which "auto" stands for the
arguments' values.

How it fits in: the Trainer's `model` is the user's module, as with DeepSpeed and DDP; its
`model_wrapped` is the engine, which runs training and evaluation. The engine exists from the
constructor on, because that is where weights go into chunks. `checkpoint-N` is a checkpoint of the
engine (so it needs no memory to write, and `from_pretrained` loads it) with the Trainer's files in
it. The losses are those of an ordinary Trainer, bit for bit in fp32.

For another subclass of `Trainer`: `class Mine(OnChunks, TheirTrainer): ...`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import set_seed

from patrickstar.checkpoint import rng_state, set_rng_state
from patrickstar.config import load_config
from patrickstar.engine.client_optimizer import groups_of, rule_of, scheduler_for
from patrickstar.engine.engine import Engine
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import make_engine
from patrickstar.errors import ConfigError
from patrickstar.integrations.accelerate import Accelerator
from patrickstar.integrations.arguments import config_of
from patrickstar.integrations.settings import Config

_MANIFEST = "state.json"  # only a checkpoint of the engine has it


class OnChunks:
    """What makes a `transformers.Trainer` train on chunks; goes before it in the list of bases.

    Args:
        model: a module, or a callable that builds it.
        args: as for the Trainer.
        patrickstar: budgets and the rest of the section "patrickstar", or a whole config.
        model_init: builds the model; called once.
        optimizers: a ready optimizer over `model.parameters()` whose formula is taken over, and a
            schedule.

    Attributes:
        engine: the engine; `engine.memory_report()` tells bytes by tier.

    Raises:
        ConfigError: an argument that cannot work on chunks, or contradicts the config.
        BudgetError: the budgets are too small; it says the smallest that works.
    """

    engine: Engine
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: Any

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        args: Any = None,
        *rest: Any,
        patrickstar: Config | None = None,
        model_init: Callable[..., nn.Module] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        **kwargs: Any,
    ) -> None:
        if (model is None) == (model_init is None):
            raise ConfigError("Trainer needs model=... or model_init=..., one of the two")
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        self.args = args
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs = kwargs.get("optimizer_cls_and_kwargs")
        self._after_init: dict[str, Any] | None = None
        provider: Any = model
        if model_init is not None:
            set_seed(args.seed)
            takes_trial = bool(inspect.signature(model_init).parameters)
            provider = (lambda: model_init(None)) if takes_trial else model_init
        self._make_engine(provider, patrickstar)
        if model_init is not None:
            # An ordinary Trainer builds the model at the beginning of `train`, and goes on from
            # there with the random state that the building left.
            self._after_init = rng_state()
        chunked, scheduler = self.engine.optimizer, self.lr_scheduler
        assert chunked is not None
        if scheduler is not None:
            scheduler = scheduler_for(scheduler, chunked)
        super().__init__(  # type: ignore[call-arg]
            self.engine.module, args, *rest, optimizers=(chunked, scheduler), **kwargs
        )
        self.model_wrapped: Any = self.engine

    def _make_engine(self, provider: Any, given: Config | None) -> None:
        settings = settings_from(load_config(config_of(self.args, given)))
        ready = self.optimizer
        rule, hyper = rule_of(ready if ready is not None else self._example())

        def groups(module: nn.Module) -> Any:
            if ready is None:
                super(OnChunks, self).create_optimizer(module)  # type: ignore[misc]
            return groups_of(self.optimizer, module)(module)

        if isinstance(provider, nn.Module):
            self.model = provider
        engine, chunked = make_engine(provider, replace(settings, rule=rule, hyper=hyper), groups)
        self.engine, self.optimizer, self.model = engine, chunked, engine.module

    def _example(self) -> torch.optim.Optimizer:
        """An optimizer of the kind that the arguments ask for, over nothing much."""
        made = self.optimizer_cls_and_kwargs
        if made is None:
            try:
                made = self.get_optimizer_cls_and_kwargs(self.args, None)  # type: ignore[attr-defined]
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"optim={str(self.args.optim)!r}: {error}") from error
        kind, kwargs = made
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            raise ConfigError(
                f"optim={str(self.args.optim)!r} is no class of torch.optim; chunks work with "
                "every elementwise one there is, for example adamw_torch"
            )
        return kind([nn.Parameter(torch.zeros(1))], **kwargs)

    # The Trainer's seams

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # Both share Accelerate's state, so what is bound to the first works for the second.
        self.accelerator = Accelerator(
            **{k: v for k, v in self._accelerator_args.items() if k != "mixed_precision"}
        )
        self.accelerator.adopt(self.engine)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        made: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        made["mixed_precision"] = "no"  # the engine's own precision, without autocast
        self._accelerator_args = made
        return made

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine's tiers say where the model is."""

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if model in (self.engine, self.engine.module):
            return self.engine
        found: nn.Module = super()._wrap_model(model, *args, **kwargs)  # type: ignore[misc]
        return found

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # no mesh; and looking at gradients would fetch them

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        if self._after_init is not None:
            set_rng_state(self._after_init)
            self._after_init = None
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the model is built into chunks once."""
        raise ConfigError(
            "hyperparameter_search builds the model anew for every trial, and chunks are laid out "
            "once; make a Trainer for every trial"
        )

    # Saving and loading

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what `from_pretrained` loads, one chunk at a time.

        A Trainer's checkpoint is the engine's: weights, master weights and optimizer states.
        """
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        adapters = _is_adapted(self.model)
        if _internal_call and not self.args.save_only_model:
            self.engine.save_checkpoint(
                folder.parent, folder.name, save_latest=False, exclude_frozen_parameters=adapters
            )
        elif not adapters:
            self.engine.save_16bit_model(folder)
        if self.args.should_save:
            self._save_beside(folder, adapters)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(  # type: ignore[attr-defined]
                commit_message="Model save", revision=self.args.hub_revision
            )

    def _save_beside(self, folder: Path, adapters: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if adapters:
            trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
            weights = self.engine.state_dict()
            self.model.save_pretrained(folder, {n: w for n, w in weights.items() if n in trained})
        for part in (getattr(self.model, "generation_config", None), self._tokenizer()):
            if part is not None:
                part.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _tokenizer(self) -> Any:
        given = getattr(self, "processing_class", None)
        return given if given is not None else getattr(self.data_collator, "tokenizer", None)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:  # the optimizer is in the engine's checkpoint
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):  # an ordinary Trainer's: weights
            super()._load_from_checkpoint(resume_from_checkpoint, self.engine)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not _is_ours(checkpoint):
            raise ConfigError(
                f"{checkpoint!r} is no checkpoint of an engine, so its optimizer's state cannot be "
                "taken over. Start from its weights: model_init=lambda: "
                f"AutoModel...from_pretrained({checkpoint!r})"
            )
        self._load_engine(checkpoint)
        schedule = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if _is_ours(best):
            self._load_engine(best, load_module_only=True)
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_engine(self, checkpoint: str, **kwargs: Any) -> None:
        folder, random = Path(checkpoint), rng_state()
        self.engine.load_checkpoint(folder.parent, folder.name, **kwargs)
        set_rng_state(random)  # the Trainer restores its own, later


def _is_ours(checkpoint: str) -> bool:
    return (Path(checkpoint) / _MANIFEST).is_file()


def _is_adapted(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "active_adapters")


class Trainer(OnChunks, transformers.Trainer):
    """`transformers.Trainer` on chunks; see `OnChunks`."""


class Seq2SeqTrainer(OnChunks, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on chunks, which generates in evaluation; see `OnChunks`."""
