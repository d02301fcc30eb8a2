"""What `TrainingArguments` say, as a config of the engine.

The arguments decide; a config may leave a key out, say "auto", or agree. What the Trainer does
itself (accumulation, clipping, the schedule) is left out of the engine's config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from patrickstar.errors import ConfigError
from patrickstar.integrations.settings import Config, merged, read_config

_ALONE = {"memory", "chunk_size", "policy", "device", "prefetch", "piece_size"}
# Keys of the config that an argument decides: its name, and its value in the config's terms.
_DECIDED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps",
        lambda a: a.gradient_accumulation_steps,
    ),
    "gradient_clipping": ("max_grad_norm", lambda a: a.max_grad_norm),
    "train_micro_batch_size_per_gpu": (
        "per_device_train_batch_size",
        lambda a: a.per_device_train_batch_size,
    ),
    "train_batch_size": (
        "per_device_train_batch_size",
        lambda a: (
            a.per_device_train_batch_size * a.gradient_accumulation_steps * max(1, a.world_size)
        ),
    ),
}
_REFUSED = {
    "deepspeed": "the model would belong to DeepSpeed; give its config as patrickstar=...",
    "fsdp": "the model would belong to FSDP; ranks are the engine's business",
    "torch_compile": "compile blocks of the model in model_init instead (module.compile())",
    "auto_find_batch_size": "a budget is no out-of-memory error; give the batch size",
    "fp16_full_eval": "evaluation runs in the engine's precision; use fp16=True",
    "bf16_full_eval": "evaluation runs in the engine's precision; use bf16=True",
}


def config_of(args: Any, given: Config | None) -> dict[str, Any]:
    """The engine's config for a Trainer with these arguments.

    Args:
        args: `transformers.TrainingArguments`.
        given: the section "patrickstar" alone, or a whole config.

    Raises:
        ConfigError: an argument cannot work on chunks, or contradicts the config.
    """
    for name, instead in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name}={getattr(args, name)!r} does not work on chunks: {instead}")
    raw = read_config(given)
    if raw and set(raw) <= _ALONE:
        raw = {"patrickstar": raw}
    for key, (argument, value) in _DECIDED.items():
        said = raw.pop(key, "auto")
        if said not in ("auto", None, value(args)):
            raise ConfigError(
                f"{key} is {said!r} in the config, and {argument}={getattr(args, argument)!r} in "
                f'TrainingArguments; leave it out of the config, or write "auto"'
            )
    for section, instead in (
        ("optimizer", "optim, learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon"),
        ("scheduler", "lr_scheduler_type, warmup_steps, lr_scheduler_kwargs"),
    ):
        explicit = _explicit(raw.pop(section, None))
        if explicit:
            raise ConfigError(
                f"{section} has values in the config: {', '.join(explicit)}. The Trainer makes it, "
                f"so set {instead} in TrainingArguments, and leave the section out of the config"
            )
    return merged(raw, _precision(args))


def _explicit(section: Any) -> list[str]:
    """The parameters of an optimizer or scheduler that are not left to the arguments."""
    parameters = section.get("params", {}) if isinstance(section, Mapping) else {}
    return [f"params.{key}" for key, value in parameters.items() if value != "auto"]


def _precision(args: Any) -> str:
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "no"
