"""From the ``optimizer`` and ``scheduler`` sections of a DeepSpeed config to rules and schedules.

Names and defaults are DeepSpeed's (0.19.8): ``"Adam"`` means AdamW unless ``adam_w_mode`` is false,
Adam and AdamW have no weight decay by default (PyTorch's AdamW has 0.01, and so has
``torch_adam``), and any other name is one of `torch.optim` or `torch.optim.lr_scheduler`.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from patrickstar.errors import ConfigError
from patrickstar.optim.adagrad import Adagrad
from patrickstar.optim.adam import Adam, AdamW
from patrickstar.optim.lamb import Lamb
from patrickstar.optim.lion import Lion
from patrickstar.optim.muon import Muon
from patrickstar.optim.one_cycle import OneCycle
from patrickstar.optim.schedule import LRRangeTest, WarmupCosineLR, WarmupDecayLR, WarmupLR
from patrickstar.optim.sgd import SGD
from patrickstar.optim.torch_rule import TorchRule
from patrickstar.optim.update import UpdateRule

# Read by the code that picks a rule, not by the rule.
_CHOICES = frozenset(("torch_adam", "adam_w_mode"))
_WITHOUT_EFFECT = {
    "fused": "there is one implementation",
    "foreach": "there is one implementation",
    "capturable": "there is one implementation",
    "differentiable": "an update of chunks cannot be differentiated",
    "set_grad_none": "gradients live in chunks",
    "fp32_optimizer_states": "moments are fp32",
}
_OUR_SCHEDULES = (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
_REJECTED = {
    "onebitadam": "AdamW; compressed communication has no effect on one machine",
    "zerooneadam": "AdamW; compressed communication has no effect on one machine",
    "onebitlamb": "Lamb; compressed communication has no effect on one machine",
    "muadam": "AdamW with parameter groups whose rates follow their widths",
    "muadamw": "AdamW with parameter groups whose rates follow their widths",
    "musgd": "SGD with parameter groups whose rates follow their widths",
}


def rule_named(
    name: str, params: Mapping[str, Any] | None = None, *, deepspeed_exact: bool = False
) -> tuple[UpdateRule, dict[str, Any]]:
    """The rule of an ``optimizer`` section, and its hyperparameters, checked.

    Args:
        name: ``type`` of the section; in any case, except for classes of `torch.optim`.
        params: ``params`` of the section.
        deepspeed_exact: also reproduce what is odd in DeepSpeed (see `Lion`), and take PyTorch's
            own operators for ``torch_adam``.

    Returns:
        the rule, and a dict with every hyperparameter it reads. For Muon the latter is that of its
        matrices; `muon_hyper` has both halves.

    Raises:
        ConfigError: an unknown name, an unknown hyperparameter, or one out of range.
    """
    given = dict(params or {})
    if "max_grad_norm" in given:
        raise ConfigError(
            f"optimizer {name}: max_grad_norm is no optimizer parameter, use gradient_clipping"
        )
    lowered = name.lower()
    if lowered in _REJECTED:
        raise ConfigError(f"optimizer {name} is not available, use {_REJECTED[lowered]}")
    if lowered == "muon":
        rule: UpdateRule = Muon(aux=AdamW() if given.get("adam_w_mode", True) else Adam())
        return rule, muon_hyper(rule, given, use_muon=True)
    rule, defaults = _known(lowered, given, deepspeed_exact) or _from_torch(name)
    hyper = _fill(rule.name, defaults, given, defaults)
    rule.check(hyper)
    return rule, hyper


def muon_hyper(rule: UpdateRule, params: Mapping[str, Any], *, use_muon: bool) -> dict[str, Any]:
    """Hyperparameters of one half of the parameters under ``"Muon"``.

    A shared value counts for both halves; ``muon_lr`` and ``adam_lr`` go before ``lr``.

    Args:
        rule: from `rule_named`.
        params: ``params`` of the section, or of a parameter group over those.
        use_muon: which half.
    """
    assert isinstance(rule, Muon)
    defaults = rule.group_defaults(use_muon=use_muon)
    del defaults["use_muon"]
    known = {*rule.defaults, "muon_lr", "adam_lr"} - {"use_muon"}
    hyper = _fill(rule.name, defaults, params, known)
    hyper["lr"] = params.get("muon_lr" if use_muon else "adam_lr", hyper["lr"])
    hyper["use_muon"] = use_muon
    rule.check(hyper)
    return hyper


def schedule_named(name: str, params: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """What makes the schedule of a ``scheduler`` section for an optimizer.

    Args:
        name: ``type``: one of DeepSpeed's, in any case, or of `torch.optim.lr_scheduler`.
        params: ``params`` of the section.

    Raises:
        ConfigError: an unknown name or parameter. A value out of range raises when it is made.
    """
    given = dict(params or {})
    known = {cls.__name__.lower(): cls for cls in _OUR_SCHEDULES}
    make: Any = known.get(name.lower()) or getattr(torch.optim.lr_scheduler, name, None)
    if not callable(make):
        theirs = [n for n in dir(torch.optim.lr_scheduler) if n.endswith("LR")]
        ours = [cls.__name__ for cls in _OUR_SCHEDULES]
        raise _unknown("scheduler", name, ours + theirs)
    accepted = [p for p in inspect.signature(make).parameters if p != "optimizer"]
    for key in given:
        if key not in accepted:
            raise _unknown(f"scheduler {name}", key, accepted)
    return lambda optimizer: make(optimizer, **given)


def _known(
    name: str, given: dict[str, Any], exact: bool
) -> tuple[UpdateRule, dict[str, Any]] | None:
    """Rules of our own; `name` in lower case."""
    if name in ("adam", "adamw"):
        rule: UpdateRule = AdamW() if name == "adamw" or given.get("adam_w_mode", True) else Adam()
        if not given.get("torch_adam", False):
            return rule, rule.defaults | {"weight_decay": 0.0}
        if exact:
            rule = TorchRule(torch.optim.AdamW if isinstance(rule, AdamW) else torch.optim.Adam)
        return rule, rule.defaults
    if name == "adagrad":
        rule = Adagrad(fused=not exact)
        return rule, rule.defaults
    if name == "lion":
        rule = Lion(deepspeed_exact=exact)
        return rule, rule.defaults | {"lr": 1e-3, "betas": (0.9, 0.999)}
    if name in ("lamb", "sgd"):
        rule = Lamb() if name == "lamb" else SGD()
        return rule, rule.defaults
    return None


def _from_torch(name: str) -> tuple[UpdateRule, dict[str, Any]]:
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    classes.pop("Optimizer", None)
    if name not in classes:
        raise _unknown("optimizer", name, [*classes, "Lion", "Lamb", "Muon"])
    rule = TorchRule(classes[name])
    return rule, rule.defaults


def _fill(
    rule: str, defaults: dict[str, Any], given: Mapping[str, Any], known: Iterable[str]
) -> dict[str, Any]:
    """Defaults with what was given over them; every given key must have a meaning."""
    for key in given:
        if key in known or key in _CHOICES:
            continue
        if key not in _WITHOUT_EFFECT:
            raise _unknown(f"optimizer {rule}", key, known)
        warnings.warn(
            f"optimizer {rule}: {key} has no effect here, {_WITHOUT_EFFECT[key]}", stacklevel=3
        )
    hyper = defaults | {key: value for key, value in given.items() if key in defaults}
    # JSON has lists only.
    if isinstance(hyper.get("betas"), list):
        hyper["betas"] = tuple(hyper["betas"])
    return hyper


def _unknown(where: str, key: str, known: Iterable[str]) -> ConfigError:
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower(), lowered, n=1)
    hint = f", did you mean {lowered[near[0]]!r}?" if near else f"; known: {sorted(known)}"
    return ConfigError(f"{where}: {key!r} is unknown{hint}")
