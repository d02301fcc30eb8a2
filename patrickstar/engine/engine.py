"""The engine: the user's module, run under memory budgets.

It behaves as the module it wraps (names, modes, attributes, state_dict) and adds what training
needs: forwards and backwards as segments of a traced iteration, the loss scale, and the counters
that say when an accumulation is complete. Everything it works with is handed in; see `initialize`.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from patrickstar.checkpoint import nothing_there
from patrickstar.comm import Communicator
from patrickstar.engine.agreement import What
from patrickstar.engine.closing import hand_back
from patrickstar.engine.compiled import pin_compiled_modules
from patrickstar.engine.contents import Counters, Training
from patrickstar.engine.deepspeed_names import DeepSpeedNames
from patrickstar.engine.gradients import Gradients
from patrickstar.engine.modes import ModesKept
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.plain_backward import PlainBackward
from patrickstar.engine.precision import Precision
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.recorded_run import RecordedRun
from patrickstar.engine.refusal import shapes_of, with_smallest
from patrickstar.engine.region_inputs import RegionInputs
from patrickstar.engine.resuming import load
from patrickstar.engine.saved_tensors import SavedTensors
from patrickstar.engine.saving import save, save_weights
from patrickstar.engine.segments import Segments, signature
from patrickstar.engine.snapshot import Snapshot
from patrickstar.engine.state import ModelState
from patrickstar.engine.telling import Telling
from patrickstar.engine.together import agreed_tag, is_there
from patrickstar.engine.weights import gather_state_dict, load_state_dict
from patrickstar.errors import BudgetError, ChunkStateError, PatrickStarError
from patrickstar.memory import ChunkManager, MemoryReport


class Engine(DeepSpeedNames, nn.Module):
    """Runs `module`, whose parameters are in the chunks of `state`.

    Attributes:
        module: the user's module.
        micro_steps: backwards so far.
        global_steps: optimizer steps so far, skipped ones included.
        communicator: closed with the engine, if it is the engine's own.
        data_position: what checkpoints keep of the data, by its `state_dict` and `load_state_dict`;
            set by whoever feeds the run.
        telling: tells of steps, where something is wanted told.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        state: ModelState,
        gradients: Gradients,
        segments: Segments,
        precision: Precision,
        accumulation_steps: int,
        region_inputs: RegionInputs | None = None,
    ) -> None:
        super().__init__()
        # Kept out of nn.Module's registry: names must stay those of the user's module.
        self.__dict__["module"] = module
        self._state, self._gradients, self._segments = state, gradients, segments
        self._precision = precision
        self._saved = SavedTensors(state.manager, state, region_inputs)
        self.accumulation_steps = accumulation_steps
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self.optimizer: ChunkedOptimizer | None = None
        self.record: RecordedRun | None = None
        self.telling: Telling | None = None
        self.communicator: Communicator | None = None
        self.data_position: Any | None = None
        self._snapshot: Snapshot | None = None
        self._closed = False
        self._last_inputs: Any = None
        self._plain_backward = PlainBackward(self._count_micro_batch)
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        state.home.training = _training_of(weakref.ref(self))

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; floating-point inputs are cast to the training precision."""
        if torch.is_grad_enabled() or self._closed:
            self._refuse_when_over()
        pin_compiled_modules(self.module, self._state, self._compiled)
        key = signature(self.module, args, kwargs)
        try:
            with ModesKept(self.device), ExitStack() as stack:
                if torch.is_grad_enabled():
                    stack.enter_context(self._timed("fwd"))
                    stack.enter_context(self._segments.forward(key))
                    stack.enter_context(self._saved.hooks())
                else:
                    stack.enter_context(self._segments.evaluation(key))
                # Inside, so that the copies are counted like everything else that is made here.
                args, kwargs = self._precision.cast_inputs((args, kwargs))
                if not self._segments.planned:
                    self._last_inputs = shapes_of((args, kwargs))
                with self._precision.computing(self.device):
                    output = self.module(*args, **kwargs)
                if torch.is_grad_enabled():
                    scaled = self._precision.scaler is not None
                    steps = self.accumulation_steps
                    output = self._plain_backward.watch(output, steps, scaled=scaled)
                return output
        except BudgetError as error:
            raise self.refusal(error) from error

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        last: bool | None = None,
    ) -> torch.Tensor:
        """Run the backward of `loss`, scaled for the accumulation and the precision.

        Args:
            loss: a scalar.
            retain_graph: as for `torch.Tensor.backward`.
            scale_wrt_gas: divide by the number of accumulation steps.
            last: whether the step comes next, for who accumulates without telling the engine; it
                counts by itself if this is not given. `patrickstar.update_in_backward` asks.

        Returns:
            `loss` divided by the number of accumulation steps.

        Raises:
            ValueError: `loss` is no scalar.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"backward needs a scalar loss, got {what}; take the mean, or pick the loss out of "
                "the model's output (output.loss, output['loss'])"
            )
        if self.record is not None:
            self.record.recording.loss(float(loss.detach()))
        if self.telling is not None:
            self.telling.loss(loss)
        if self.accumulation_steps > 1 and scale_wrt_gas:
            loss = loss / self.accumulation_steps
        self._refuse_when_over()
        completes = self.completes_accumulation() if last is None else last
        self._plain_backward.engine_runs = True
        try:
            with (
                ModesKept(self.device),
                self._timed("bwd"),
                self._segments.backward(completes=completes and not retain_graph),
                self._gradients.backward(),
            ):
                # On the caller's thread, also for an accelerator: chunks have one bookkeeper.
                one_thread = torch.autograd.set_multithreading_enabled(False)
                with self._saved.hooks(), one_thread, self._timed("bwd_inner"):
                    scaled = self._precision.scale_loss(loss)
                    torch.autograd.backward(scaled, retain_graph=retain_graph)
                self._saved.tidy()
            self.micro_steps += 1
        except BudgetError as error:
            raise self.refusal(error) from error
        finally:
            self._plain_backward.engine_runs = False
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for `engine.scale(loss).backward()`."""
        self._plain_backward.is_scaled = True
        return self._precision.scale_loss(loss)

    def _count_micro_batch(self) -> None:
        self._gradients.is_over()
        self.micro_steps += 1

    def _refuse_when_over(self) -> None:
        if self.optimizer is not None:
            self.optimizer.refuse_when_over()

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.telling is None else self.telling.timed(part)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step of the optimizer, which is told of when it is over."""
        if self.telling is None:
            yield
            return
        steps = self.global_steps
        with self.telling.timed("step"):
            yield
        self.telling.stepped(self, updated=self.global_steps > steps)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside leave gradients on their ranks; the next one outside reduces the sum.

        At every stage of ZeRO. It saves the reductions and takes memory for this rank's gradients,
        in chunks like everything else.
        """
        reducer = self._gradients.reducer
        if reducer is None:
            yield
            return
        before, reducer.enabled = reducer.enabled, False
        try:
            yield
        finally:
            reducer.enabled = before

    @property
    def ranks(self) -> Ranks | None:
        """Those that train together; None if there is one."""
        return self._state.ranks

    def refusal(self, error: BudgetError) -> BudgetError:
        """`error`, naming the smallest budget that works for the inputs that came last."""
        if self.ranks is not None:  # a rehearsal knows nothing of gathering
            return error
        if self._segments.planned or self._last_inputs is None:
            return error
        assert self.optimizer is not None
        groups, base = self.optimizer.param_groups, self._segments.base
        return with_smallest(
            error,
            self.module,
            self._state,
            groups,
            self._last_inputs,
            base,
            self.accumulation_steps,
        )

    def step(self) -> None:
        """`optimizer.step()` followed by `zero_grad()`, for those who step the engine."""
        assert self.optimizer is not None
        self.optimizer.step()

    # Reporting

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients at the last step, before clipping; None before the first."""
        return None if self.optimizer is None else self.optimizer.grad_norm

    def mean_over_ranks(self, value: float) -> float:
        """The mean of what all ranks have as `value`, a loss for example; they all call this."""
        if self.ranks is None:
            return value
        (total,) = self.ranks.comm.reductions.sum([value])
        return total / self.world_size

    def get_lr(self) -> list[float]:
        """The learning rate of every parameter group."""
        assert self.optimizer is not None
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 without fp16."""
        return self._precision.loss_scale

    def was_step_applied(self) -> bool:
        """Whether the last step made its update; fp16 skips those that overflow."""
        return self.optimizer is not None and self.optimizer.applied

    def memory_report(self) -> MemoryReport:
        """Bytes in use, peak and budget of every tier, and bytes moved between them so far."""
        return self._state.manager.report()

    def schedule_with(self, scheduler: Any) -> None:
        """Step `scheduler` after every update from now on."""
        assert self.optimizer is not None
        self.optimizer.schedule_with(scheduler)
        self.lr_scheduler = scheduler

    def reset_peak(self) -> None:
        self._state.manager.ledger.reset_peak()

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where its inputs belong."""
        return self._segments.device

    @property
    def memory(self) -> ChunkManager:
        """The memory manager, for reports and experiments."""
        return self._state.manager

    # Being the module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def train(self, mode: bool = True) -> Engine:
        super().train(mode)
        self.module.train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return found

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> Engine:
        self.module.apply(fn)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """The full weights, in the training precision, copied out of the chunks."""
        return gather_state_dict(self.module, self._state, *args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights into the chunks; master weights take their full precision."""
        return load_state_dict(self.module, self._state, state_dict, strict=strict)

    # Checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> bool:
        """Write the checkpoint `save_dir/tag`, complete or not at all; see `engine.saving`.

        Args:
            tag: a plain name; "global_step" and the number of steps if not given.
            client_state: numbers, texts, bytes, small tensors, lists, tuples and dicts of yours.
            save_latest: whether `load_checkpoint` finds it without its tag.
            exclude_frozen_parameters: leave out what is not trained.
            keep: how many checkpoints `save_dir` has at most afterwards; older ones are removed.
            asynchronous: write while training goes on; see `engine.snapshot`. It is complete after
                `wait_for_checkpoint`, the next save, a load, or `close`; these tell if it failed.
                With several ranks it is complete when this returns.

        Returns:
            True, as DeepSpeed does.

        Raises:
            CheckpointError: something cannot be stored, or the disk is full or failed; the
                checkpoints that were there before are as they were.
            ChunkStateError: an optimizer step ended early, so the weights are not those of one.
        """
        self._refuse_when_over()
        self.wait_for_checkpoint()
        self.memory.do_due()
        assert self.optimizer is not None
        write = Snapshot if asynchronous and self.ranks is None else save
        written = write(
            self._training(),
            Path(save_dir),
            agreed_tag(
                self.ranks,
                f"global_step{self.global_steps}" if tag is None else str(tag),
                "WARN" if self.config is None else self.config.checkpoint.tag_validation,
            ),
            dict(client_state or {}),
            keep=keep,
            latest=save_latest,
            frozen=not exclude_frozen_parameters,
        )
        if isinstance(written, Snapshot):
            self._snapshot = self.optimizer.snapshot = written
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the checkpoint that is being written is complete, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            assert self.optimizer is not None
            self.optimizer.snapshot = None
            snapshot.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from the checkpoint `load_dir/tag`, or from the latest; see `engine.resuming`.

        Args:
            load_module_strict: the checkpoint must have exactly this model's weights.
            load_module_only: take nothing but the weights.

        Returns:
            the checkpoint's folder, and the `client_state` it was saved with; None and {} if no tag
            is given and `load_dir` has no checkpoint. A warning says so then, and where the nearest
            one is.

        Raises:
            CheckpointError: it is missing, damaged, or does not fit this run; or no tag is given,
                and `load_dir` is a checkpoint itself or has some but no latest one.
        """
        self.wait_for_checkpoint()
        self.memory.do_due()
        if self.optimizer is not None:
            self.optimizer.give_up_step()
        if tag is None and not is_there(self.ranks, Path(load_dir)):
            warnings.warn(nothing_there(Path(load_dir)), stacklevel=2)
            return None, {}
        what = What(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            progress=not load_module_only,
            strict=load_module_strict,
        )
        path, client_state, counters = load(self._training(), Path(load_dir), tag, what)
        if what.optimizer and self.optimizer is not None:
            self.optimizer.torn = False
        self.global_steps, self.micro_steps = counters.global_steps, counters.micro_steps
        self.note_step()
        self.skipped_steps = counters.skipped_steps
        return str(path), client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in the training precision, as safetensors that transformers loads.

        Args:
            save_filename: a name that ends with ".bin" gets ".safetensors" instead.

        Returns:
            True, as DeepSpeed does.

        Raises:
            CheckpointError: as `save_checkpoint`.
        """
        save_weights(
            self._training(), Path(save_dir), save_filename, frozen=not exclude_frozen_parameters
        )
        return True

    def _training(self) -> Training:
        assert self.optimizer is not None
        return Training(
            self.module,
            self._state,
            self._gradients,
            self._segments,
            self._precision,
            self.optimizer,
            self.optimizer.stepping,
            Counters(
                self.global_steps, self.micro_steps, self.skipped_steps, self.accumulation_steps
            ),
            self.data_position,
        )

    def extra_repr(self) -> str:
        tiers = ", ".join(tier.name for tier in self._state.manager.tiers)
        return f"{len(self._state.aligned)} chunks over {tiers}"

    @contextmanager
    def gathered_parameters(self) -> Iterator[nn.Module]:
        """The module with every parameter resident, for code that needs them all at once."""
        from patrickstar.memory import Access, Use

        uses = [Use(a.parameter.id, Access.READ) for a in self._state.aligned]
        with self._state.manager.use(uses):
            yield self.module

    def close(self) -> None:
        """Stop moving chunks and give their memory back. Closing twice is harmless.

        Where the parameters fit the budget, they become ordinary ones with the values they have,
        and `module` can be used without the engine; where not, they are left without data. See
        `engine.closing`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait_for_checkpoint()
            self.memory.do_due()
        finally:
            if self.optimizer is not None:
                self.optimizer.closed = True
                self.optimizer.give_up_step()
            self._segments.abandon()
            self._gradients.remove_hooks()
            self._state.home.training = None
            try:
                # What cannot be brought back any more is what an error was raised for before.
                with contextlib.suppress(PatrickStarError):
                    hand_back(self.module, self._state)
            finally:
                self._state.manager.close()
                if self.communicator is not None:
                    self.communicator.close()
                if self.record is not None:
                    self.record.close()
                if self.telling is not None:
                    self.telling.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        raise ChunkStateError(
            "an engine cannot be copied: its weights are in chunks that only one run may change. "
            "copy.deepcopy(engine.module) copies the model into ordinary memory, and "
            "save_checkpoint with load_checkpoint copies a run"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.__deepcopy__({})


def _training_of(engine: weakref.ref[Engine]) -> Callable[[], Training | None]:
    """Tells the parts of the run as long as its engine is there, without keeping it there."""

    def training() -> Training | None:
        there = engine()
        return None if there is None else there._training()

    return training
