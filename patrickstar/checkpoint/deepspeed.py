"""DeepSpeed's ZeRO checkpoints, read without DeepSpeed and without running anything in them.

    runs/global_step20/mp_rank_00_model_states.pt                          stages 1 and 2
    runs/global_step20/zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3, process R
    runs/global_step20/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    process R

`import_checkpoint` writes the same values as a checkpoint of ours: master weights, moments, step
counts, hyperparameters, loss scale, the position of the schedule, the counters, and the client's
state as far as it is plain data. Tensors go from file to file in blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from patrickstar.checkpoint.checkpoint import write_checkpoint
from patrickstar.checkpoint.fields import taking_over
from patrickstar.checkpoint.folder import find
from patrickstar.checkpoint.header import is_shape
from patrickstar.checkpoint.pickled import Foreign, PickledTensor, TorchFile
from patrickstar.checkpoint.plain import encode
from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.checkpoint.zero_layout import (
    Flats,
    Range,
    cut,
    ranges_of_flat_groups,
    ranges_of_parts,
    whole,
)
from patrickstar.errors import CheckpointError

_OWN_KEYS = frozenset(
    """module buffer_names optimizer param_shapes frozen_param_shapes shared_params
    frozen_param_fragments lr_scheduler data_sampler random_ltd sparse_tensor_module_names
    skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info""".split()
)
_PARTS = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_(model|optim)_states\.pt")
_MODEL = "mp_rank_00_model_states.pt"
_RULES = {
    ("exp_avg", "exp_avg_sq"): "AdamW",
    ("exp_avg",): "Lion",
    ("momentum_buffer",): "SGD",
    ("sum",): "Adagrad",
}
_MOST_NODES = 1_000_000
_BLOCK = 4 << 20  # elements


def import_checkpoint(
    source: Path, target: Path, tag: str | None = None, *, optimizer: str | None = None
) -> tuple[Path, list[str]]:
    """Write DeepSpeed's checkpoint `source/tag` as the checkpoint `target/tag` of ours.

    Args:
        source: a folder of checkpoints, or without a tag a checkpoint's own.
        target: a folder that has no checkpoint of that tag; it may have others.
        tag: the latest if not given.
        optimizer: the name of the update rule that goes on; told from its states if not given.

    Returns:
        the folder of the new checkpoint, and what of the old one could not be taken over.

    Raises:
        CheckpointError: files are missing or damaged, name what may not be named, or come from
            tensor or pipeline parallelism.
    """
    if tag is None and any(source.glob("*_states.pt")):
        source, tag = source.absolute().parent, source.absolute().name
    folder = find(source, tag)
    if (target / folder.name).exists():
        raise CheckpointError(
            f"{str(target / folder.name)!r} exists already and is not written over; "
            "choose another folder for PatrickStar's checkpoints"
        )
    if (folder / "offloaded_tensors").exists():
        raise CheckpointError(
            f"{str(folder)!r} is of a run with its optimizer's states on NVMe; they lie in swap "
            "files there, which are not read. DeepSpeed's engine.save_16bit_model gives the weights"
        )
    with ExitStack() as stack:
        files = {
            path.name: stack.enter_context(closing(TorchFile(path)))
            for path in sorted(folder.iterdir())
            if path.name.endswith("_states.pt")
        }
        for file in files.values():
            file.verify()
        with taking_over(f"the DeepSpeed checkpoint in {str(folder)!r}: what"):
            found = _Checkpoint(folder, files)
            weights, states = found.weights(), found.states()
            state, lost = found.state(optimizer)
        return write_checkpoint(target, folder.name, weights, states, state), lost


class _Checkpoint:
    """The parts of an open checkpoint."""

    def __init__(self, folder: Path, files: Mapping[str, TorchFile]) -> None:
        by_rank: dict[str, dict[int, TorchFile]] = {"model": {}, "optim": {}}
        for name, file in files.items():
            match = _PARTS.fullmatch(name)
            if match:
                by_rank[match[2]][int(match[1])] = file
            elif name != _MODEL:
                raise CheckpointError(
                    f"{name!r} in {str(folder)!r} comes from tensor or pipeline parallelism, which "
                    "is not read; convert it with DeepSpeed's ds_to_universal or zero_to_fp32 first"
                )
        self._optim = [by_rank["optim"][rank].content for rank in sorted(by_rank["optim"])]
        if not self._optim:
            raise CheckpointError(
                f"there is no *_optim_states.pt of ZeRO in {str(folder)!r}; only checkpoints of "
                "stage 1, 2 and 3 are read"
            )
        zero = [content["optimizer_state_dict"] for content in self._optim]
        self._zero: list[dict[str, Any]] = zero
        # Stage 1 in bf16 with fp32 gradients is an optimizer of its own, which writes no stage.
        self.stage = _stage(zero[0].get("zero_stage", 1))
        world = zero[0]["partition_count"]
        world = max(world) if isinstance(world, list) else world
        if world != len(zero) or sorted(by_rank["optim"]) != list(range(world)):
            raise CheckpointError(
                f"{str(folder)!r} has optimizer states of {len(zero)} processes of {world}; a "
                "process did not save, or files are missing"
            )
        models = by_rank["model"] if self.stage == 3 else {0: files.get(_MODEL)}
        self._models = [file.content for _, file in sorted(models.items()) if file is not None]
        if len(self._models) != (world if self.stage == 3 else 1):
            raise CheckpointError(f"model states are missing in {str(folder)!r}")
        self._model: dict[str, Any] = self._models[0]
        self._groups = [dict(group) for group in self._model["param_shapes"]]
        base = zero[0]["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"]
        self._elastic = isinstance(base, list)
        self._param_groups = [] if self._elastic else base["param_groups"]

    # Tensors

    def weights(self) -> list[TensorSource]:
        """Weights in the precision they were trained in, and buffers."""
        module, shared = self._model["module"], self._model.get("shared_params") or {}
        buffers = set(self._model["buffer_names"])
        trained = {name: shape for group in self._groups for name, shape in group.items()}
        frozen = self._model.get("frozen_param_shapes") or {}
        ranges = self._ranges("fp32_flat_groups") if self.stage == 3 else {}
        made = []
        for name, tensor in module.items():
            if name in shared:
                continue
            if self.stage < 3 or name in buffers:
                made.append(_source(name, tensor.dtype, tensor.shape, [whole(tensor)]))
            elif name in trained:
                made.append(_source(name, tensor.dtype, trained[name], ranges[name]))
            elif name in frozen:
                parts = [model["frozen_param_fragments"][name] for model in self._models]
                pieces = cut([whole(part) for part in parts], math.prod(frozen[name]))
                made.append(_source(name, parts[0].dtype, frozen[name], pieces))
        return made

    def states(self) -> list[TensorSource]:
        """Master weights and the optimizer's states."""
        flats = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        kinds = {"master": flats, **{key: key for key in self._state_names()}}
        made = []
        for kind, key in kinds.items():
            ranges = self._ranges(key)
            for name, shape in ((n, s) for group in self._groups for n, s in group.items()):
                made.append(_source(f"{kind}/{name}", torch.float32, shape, ranges[name]))
        return made

    def _state_names(self) -> list[str]:
        """States that have a value for every weight."""
        first = self._entries(0)[0] if self._entries(0) else {}
        return [k for k, v in first.items() if isinstance(v, PickledTensor) and v.shape]

    def _entries(self, rank: int) -> list[dict[str, Any]]:
        """The optimizer's states of one process, a dict for each flat tensor."""
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        base = self._zero[rank][key]
        return base if self._elastic else [base["state"][i] for i in sorted(base["state"])]

    def _flats(self, key: str) -> Flats:
        if key in self._zero[0]:
            return [zero[key] for zero in self._zero]
        return [[entry[key] for entry in self._entries(r)] for r in range(len(self._zero))]

    def _ranges(self, key: str) -> dict[str, list[Range]]:
        """Where the elements of every parameter are, in order."""
        flats = self._flats(key)
        if self.stage == 3:
            return ranges_of_parts(self._groups, flats)
        paddings = self._zero[0].get("param_alignment_paddings")
        return ranges_of_flat_groups(self._groups, flats, paddings)

    # Everything else

    def state(self, optimizer: str | None) -> tuple[dict[str, Any], list[str]]:
        """What our `state.json` has, and what could not be taken over."""
        model, config, lost = self._model, self._model.get("ds_config") or {}, []
        names = sorted(self._state_names())
        rule = optimizer or self._rule(config, names)
        accumulation = config.get("gradient_accumulation_steps", 1)
        accumulation = accumulation if type(accumulation) is int and accumulation > 0 else 1
        steps = self._steps()
        parameters = {
            name: [{"rows": shape[0] if shape else 1, "step": step, "started": bool(step)}]
            for group, step in zip(self._groups, steps, strict=True)
            for name, shape in group.items()
        }
        client = {}
        for key, value in model.items():
            if key in _OWN_KEYS:
                continue
            try:
                _check_size(value)
                client[key] = encode(_read_scalars(value), f"client state {key!r}")
            except CheckpointError:
                lost.append(f"client state {str(key)[:80]!r}")
        lost += [
            what
            for what in ("data_sampler", "random_ltd", "optimizer")
            if model.get(what) is not None
        ]
        scheduler = (config.get("scheduler") or {}).get("type")
        position = model.get("lr_scheduler")
        return {
            "counters": {
                "global_steps": model["global_steps"],
                "micro_steps": model["global_steps"] * accumulation,
                "skipped_steps": model["skipped_steps"],
                "accumulation_steps": accumulation,
            },
            "precision": "imported",
            "loss_scale": self._loss_scale(config),
            "grad_norm": None,
            "applied": False,
            "optimizer": {"type": rule, "groups": self._hyper()},
            "parameters": parameters,
            "scheduler": None
            if not scheduler or position is None
            else {"type": scheduler, "state": encode(position, "the schedule")},
            "data": None,
            "rng": [],
            "extra_state": {},
            "excluded": [],
            "client": client,
        }, lost

    def _rule(self, config: Mapping[str, Any], names: list[str]) -> str:
        given = config.get("optimizer") or {}
        rule = _RULES.get(tuple(names))
        if rule is None:
            raise CheckpointError(
                f"the optimizer's states are {', '.join(names)[:200]}; say with optimizer= by "
                "which update rule training goes on"
            )
        adam_w = (given.get("params") or {}).get("adam_w_mode", True)
        is_adam = str(given.get("type", "")).lower() == "adam" and rule == "AdamW"
        return "Adam" if is_adam and not adam_w else rule

    def _steps(self) -> list[int]:
        """Updates so far of each parameter group."""
        count = len(self._groups)
        # In stage 3 a group has one or several flat tensors; all are updated at every step.
        entries = self._entries(0)[:1] * count if self.stage == 3 else self._entries(0)
        shared = self._zero[0].get("base_optimizer_state_step")
        groups = self._param_groups or [{}] * count
        return [
            _number(next((s for s in (e.get("step"), shared, g.get("step")) if s is not None), 0))
            for e, g in zip(entries or [{}] * count, groups, strict=True)
        ]

    def _hyper(self) -> list[dict[str, Any]]:
        skipped = ("params", "step")
        return [
            {k: encode(_read_scalars(v), k) for k, v in group.items() if k not in skipped}
            for group in self._param_groups or [{}] * len(self._groups)
        ]

    def _loss_scale(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        scaler = self._zero[0].get("loss_scaler")
        enabled = (config.get("fp16") or {}).get("enabled", False)
        if not isinstance(scaler, Foreign) or not enabled:
            return None
        keys = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        if scaler.name != "DynamicLossScaler":
            return {"type": "StaticLossScale", "state": {"cur_scale": scaler.state["cur_scale"]}}
        return {
            "type": "DynamicLossScale",
            "state": {key: scaler.state[key] for key in keys if key in scaler.state},
        }


def _stage(value: Any) -> int:
    number = value.args[0] if isinstance(value, Foreign) else value
    if number not in (1, 2, 3):
        raise CheckpointError(f"it is of ZeRO stage {str(number)[:20]}, not 1, 2 or 3")
    return int(number)


def _source(
    name: str, dtype: torch.dtype, shape: Sequence[int], ranges: Sequence[Range]
) -> TensorSource:
    if not isinstance(name, str) or not is_shape(list(shape)):
        raise CheckpointError(f"a parameter called {str(name)[:80]!r} has no proper shape")
    numel = sum(part.stop - part.start for part in ranges)
    if numel != math.prod(shape):
        raise CheckpointError(f"{name!r} has {numel} elements, not those of {list(shape)}")

    def parts() -> Iterator[torch.Tensor]:
        for part in ranges:
            for start in range(part.start, part.stop, _BLOCK):
                yield part.flat.read(start, min(start + _BLOCK, part.stop)).to(dtype)

    return TensorSource(name, dtype, tuple(shape), parts)


def _number(value: Any) -> int:
    value = _read_scalars(value)
    return int(value.item() if isinstance(value, torch.Tensor) else value)


def _read_scalars(value: Any) -> Any:
    """The value with small tensors read in."""
    if isinstance(value, PickledTensor):
        if value.numel * value.dtype.itemsize > 1 << 20:
            raise CheckpointError("a large tensor")
        return value.read().reshape(value.shape)
    if isinstance(value, list | tuple):
        return type(value)(_read_scalars(v) for v in value)
    if isinstance(value, dict):
        return {k: _read_scalars(v) for k, v in value.items()}
    return value


def _check_size(value: Any) -> None:
    """Refuse a value that refers to parts of itself until it is too large to be written out."""
    left, waiting = _MOST_NODES, [value]
    while waiting:
        left -= 1
        if left < 0:
            raise CheckpointError(f"it has more than {_MOST_NODES} parts")
        now = waiting.pop()
        if isinstance(now, dict):
            waiting += [*now, *now.values()]
        elif isinstance(now, list | tuple | set | frozenset):
            waiting += now
