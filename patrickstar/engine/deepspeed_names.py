"""What scripts ask of DeepSpeed's engine, under its names.

Everything here is said in terms of the engine's own few parts; a script that was written for
PatrickStar needs none of it.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from patrickstar.engine.ranks import Ranks
from patrickstar.monitor import Monitor


class DeepSpeedNames:
    """Methods and attributes that `patrickstar.engine.Engine` has for DeepSpeed's scripts.

    Attributes:
        config: the resolved config of the run.
        telling: what tells of steps, if anything does.
        training_dataloader, lr_scheduler: what `patrickstar.initialize` made or was given.
    """

    module: nn.Module
    micro_steps: int
    global_steps: int
    accumulation_steps: int
    config: Any = None
    training_dataloader: Any = None
    lr_scheduler: Any = None
    telling: Any
    _stepped_micro_steps = 0
    _boundary: bool | None = None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step, after the backward of the current micro-batch, updates.

        Between a forward and its step the answer is the same before and after the backward, as
        with DeepSpeed.
        """
        if self._boundary is not None:
            return self._boundary
        waiting = self.micro_steps > self._stepped_micro_steps
        current = self.micro_steps if waiting else self.micro_steps + 1
        return current % self.accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand whether the next step updates; holds until it is set again."""
        self._boundary = is_boundary

    def accumulation_is_complete(self) -> bool:
        """Whether every micro-batch of the current accumulation has had its backward."""
        if self._boundary is not None:
            return self._boundary
        return self.micro_steps % self.accumulation_steps == 0

    def completes_accumulation(self) -> bool:
        """Whether it is complete when one more micro-batch has had its backward."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.accumulation_steps == 0

    def restart_accumulation(self) -> None:
        """The micro-batches of an accumulation that is not complete do not count."""
        self.micro_steps -= self.micro_steps % self.accumulation_steps

    def note_step(self) -> None:
        """A step was asked for; backwards before it belong to it."""
        self._stepped_micro_steps = self.micro_steps

    @property
    def ranks(self) -> Ranks | None:
        """Those that train together; None if there is one."""
        raise NotImplementedError

    def train_batch_size(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return int(self.config.train_batch_size)

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward."""
        return int(self.config.train_micro_batch_size_per_gpu)

    def gradient_accumulation_steps(self) -> int:
        """Forwards of an optimizer step."""
        return self.accumulation_steps

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 for none."""
        return float(self.config.gradient_clipping)

    def zero_optimization_stage(self) -> int:
        """The stage that the config asks for."""
        return int(self.config.zero_optimization.stage)

    def fp16_enabled(self) -> bool:
        return bool(self.config.precision == "fp16")

    def bfloat16_enabled(self) -> bool:
        return bool(self.config.precision == "bf16")

    @property
    def global_samples(self) -> int:
        """Samples trained on so far."""
        return self.global_steps * self.train_batch_size()

    @property
    def global_rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.comm.rank

    @property
    def local_rank(self) -> int:
        """This rank's place on its machine, as the launcher says."""
        return 0 if self.ranks is None else int(os.environ.get("LOCAL_RANK", self.global_rank))

    @property
    def world_size(self) -> int:
        return 1 if self.ranks is None else len(self.ranks.comm.topology.ranks)

    def zero_optimization(self) -> bool:
        """Whether the config asks for a stage of ZeRO."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the config asks for stage 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the config asks for stage 3."""
        return self.zero_optimization_stage() >= 3

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.fp16_enabled() and not self.config.fp16.loss_scale

    def steps_per_print(self) -> int | None:
        found: int | None = self.config.steps_per_print
        return found

    def wall_clock_breakdown(self) -> bool:
        return bool(self.config.wall_clock_breakdown)

    @property
    def monitor(self) -> Monitor:
        """Takes events for the monitors of the config; writes nothing on ranks but the first."""
        return Monitor() if self.telling is None else self.telling.monitor

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last micro-batch and update; empty without wall_clock_breakdown."""
        timers = None if self.telling is None else self.telling.timers
        return {} if timers is None else dict(timers.latest)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a forward, forwards of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def get_mom(self) -> list[Any]:
        """The momentum of every parameter group; its betas where it has those."""
        groups = self.optimizer.param_groups  # type: ignore[attr-defined]
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The full weights; see `Engine.state_dict`.

        Args:
            exclude_frozen_parameters: leave out what is not trained.
        """
        found: dict[str, Any] = self.state_dict(*args, **kwargs)  # type: ignore[attr-defined]
        if exclude_frozen_parameters:
            parameters = self.module.named_parameters(remove_duplicate=False)
            for frozen in [name for name, p in parameters if not p.requires_grad]:
                found.pop(frozen, None)
        return found

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load full weights; see `Engine.load_state_dict`."""
        self.load_state_dict(state_dict, strict=strict)  # type: ignore[attr-defined]

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module; see `torch.nn.Module.compile`."""
        kwargs.update(kwargs.pop("compile_kwargs", {}))
        self.module.compile(*args, **kwargs)

    def destroy(self) -> None:
        """See `Engine.close`."""
        self.close()  # type: ignore[attr-defined]
