"""What all ranks of a run must have in common, found out before they work together.

Ranks that build other models or run with other configs would exchange chunks that are not the
same weights. Budgets may differ: what follows from them and must not differ is the least of all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patrickstar.engine.alone import names_alone
from patrickstar.engine.ranks import Ranks
from patrickstar.errors import ConfigError

if TYPE_CHECKING:
    from patrickstar.engine.initialize import RunSettings

_MOST_TOLD = 3  # differences in one message


def refuse_other_settings(settings: RunSettings, ranks: Ranks) -> None:
    """Raise on every rank if one of them has other settings that change numbers or their places.

    Raises:
        ConfigError: it names ranks, settings and values.
    """
    _refuse_unlike(
        ranks,
        "config",
        {
            "zero_optimization.stage": ranks.stage,
            "precision": settings.precision.dtype,
            "the dtype of gradients": settings.grad_dtype,
            "communication_data_type": ranks.dtype,
            "torch_autocast.lower_precision_safe_modules": [c.__name__ for c in ranks.low_classes],
            "what gradients are divided by before they travel": ranks.predivide,
            "gradient_accumulation_steps": settings.accumulation_steps,
            "gradient_clipping": settings.clipping,
            "optimizer.type": settings.rule.name,
            **{f"optimizer.params.{key}": value for key, value in settings.hyper.items()},
            "patrickstar.chunk_size": settings.chunk_limit,
            "patrickstar.piece_size": settings.piece_size,
            "patrickstar.deepspeed_exact": settings.exact,
        },
    )


def refuse_other_models(
    module: nn.Module, groups: Sequence[Mapping[str, Any]], ranks: Ranks
) -> None:
    """Raise on every rank if one of them has another model or other parameter groups.

    Raises:
        ConfigError: it names ranks, parameters and shapes.
    """
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    facts: dict[str, Any] = {}
    alone = set(names_alone(module))
    for name, parameter in module.named_parameters():
        if name in alone:
            continue
        group = group_of.get(id(parameter), "no group")
        trained = "trained" if parameter.requires_grad else "frozen"
        facts[f"parameter {name!r}"] = (*_form(parameter), trained, f"of group {group}")
    for name, buffer in module.named_buffers():
        if name in alone:
            continue
        facts[f"buffer {name!r}"] = _form(buffer)
    _refuse_unlike(ranks, "model", facts)


def take_first_ranks(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
    """Give every rank the first one's ordinary tensors (buffers), which lie in no chunk."""
    for name, tensor in tensors.items():
        if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided:
            continue
        if tensor.is_meta or not tensor.numel():
            continue
        with torch.no_grad():
            values = tensor.detach().contiguous().reshape(-1)
            ranks.from_first(name, values.view(torch.uint8))
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values.view(tensor.shape))


def _form(tensor: torch.Tensor) -> tuple[str, ...]:
    return str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch.")


def _refuse_unlike(ranks: Ranks, what: str, facts: Mapping[str, Any]) -> None:
    told = json.dumps({name: str(value) for name, value in facts.items()}).encode()
    control = ranks.comm.control
    digest = hashlib.sha256(told).digest()
    if len(set(control.exchange_bytes(f"the digest of the {what}", digest))) == 1:
        return
    first, *others = [json.loads(row) for row in control.exchange_bytes(f"the {what}", told)]
    names = ranks.comm.topology.ranks
    for rank, other in zip(names[1:], others, strict=True):
        unlike = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if unlike:
            shown = "; ".join(
                f"{key} is {other.get(key, 'missing')} on rank {rank} and "
                f"{first.get(key, 'missing')} on rank {names[0]}"
                for key in unlike[:_MOST_TOLD]
            )
            raise ConfigError(
                f"all ranks must have the same {what}, but {shown} (differences: {len(unlike)})"
            )
