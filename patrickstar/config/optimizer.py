"""``optimizer``: the rule that updates weights."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from patrickstar.config.key import Key, accepted, rejected
from patrickstar.config.named import Named, absent, parameter
from patrickstar.config.types import Bool, Float, Str


class Optimizer(Named):
    """``optimizer``.

    Attributes:
        type: in its canonical spelling: one of `spellings`, or a class of `torch.optim`.
    """

    spellings: ClassVar[tuple[str, ...]] = (
        "Adam",
        "AdamW",
        "Adagrad",
        "Lamb",
        "Lion",
        "Muon",
        "SGD",
    )


OptionalOptimizer = Annotated[Optimizer | None, BeforeValidator(absent)]

_PAIR = tuple[Float, Float]

OTHER_KEYS: tuple[Key, ...] = (
    accepted(
        "optimizer.legacy_fusion",
        Bool,
        False,
        "fuse fp16 Adam the old way",
        "an update always walks whole chunks",
    ),
    parameter("optimizer.params.lr", Float, 1e-3, "learning rate", "Adagrad 0.01, Muon 0.02"),
    parameter(
        "optimizer.params.betas",
        _PAIR,
        (0.9, 0.999),
        "decay of the moments",
        "Adam, AdamW, Lamb, Lion; the Adam half of Muon (0.9, 0.95)",
    ),
    parameter(
        "optimizer.params.eps",
        Float | tuple[Float | None, ...],
        1e-8,
        "added to the denominator",
        "Adam, AdamW, Lamb; Adagrad and the Adam half of Muon 1e-10",
    ),
    parameter(
        "optimizer.params.weight_decay",
        Float,
        0.0,
        "decay of weights",
        "with torch_adam PyTorch's default, 0.01 for AdamW",
    ),
    parameter(
        "optimizer.params.bias_correction", Bool, True, "correct moments early on", "Adam, Lamb"
    ),
    parameter(
        "optimizer.params.amsgrad",
        Bool,
        False,
        "divide by the largest second moment so far",
        "Adam, AdamW; DeepSpeed only with torch_adam",
    ),
    parameter(
        "optimizer.params.adam_w_mode",
        Bool,
        True,
        "decouple weight decay",
        'Adam and Muon; `"Adam"` means AdamW unless this is false',
    ),
    parameter(
        "optimizer.params.torch_adam",
        Bool,
        False,
        "use PyTorch's Adam",
        "Adam, AdamW; with its defaults",
    ),
    parameter("optimizer.params.momentum", Float, 0.0, "decay of the momentum", "SGD; Muon 0.95"),
    parameter("optimizer.params.nesterov", Bool, False, "Nesterov's momentum", "SGD"),
    parameter("optimizer.params.dampening", Float, 0.0, "dampening of the momentum", "SGD"),
    parameter(
        "optimizer.params.initial_accumulator_value", Float, 0.0, "first sum of squares", "Adagrad"
    ),
    parameter("optimizer.params.lr_decay", Float, 0.0, "decay of the rate", "Adagrad"),
    parameter("optimizer.params.max_coeff", Float, 10.0, "largest trust ratio", "Lamb"),
    parameter("optimizer.params.min_coeff", Float, 0.01, "smallest trust ratio", "Lamb"),
    parameter("optimizer.params.eps_inside_sqrt", Bool, False, "add eps under the root", "Lamb"),
    parameter(
        "optimizer.params.ns_method",
        Str,
        "gram",
        "iteration that orthogonalises: gram or standard",
        "Muon",
    ),
    parameter("optimizer.params.muon_lr", Float, None, "rate of the Muon half", "Muon"),
    parameter("optimizer.params.adam_lr", Float, None, "rate of the Adam half", "Muon"),
    rejected(
        "optimizer.params.per_head_muon",
        Bool,
        False,
        "orthogonalise attention projections head by head",
        "Muon orthogonalises whole matrices; leave it out",
    ),
    rejected(
        "optimizer.params.max_grad_norm",
        Float,
        None,
        "largest gradient norm",
        "use `gradient_clipping`; DeepSpeed refuses it too",
    ),
    accepted(
        "optimizer.params.set_grad_none",
        Bool,
        True,
        "free gradients in zero_grad",
        "gradients live in chunks",
        harmless=(True,),
    ),
    accepted(
        "optimizer.params.fp32_optimizer_states",
        Bool,
        None,
        "keep the moments of CPU Adam in fp32",
        "moments are always fp32",
        harmless=(True, None),
    ),
)
