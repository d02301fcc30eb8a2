"""Every key that an installed DeepSpeed knows, found in its own code.

Three ways, because DeepSpeed declares its keys in three ways: fields of pydantic models and
dataclasses; a dict is handed to its config class and notes which keys are asked for; and constants,
which come in pairs such as ``DUMP_STATE`` and ``DUMP_STATE_DEFAULT``.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import BaseModel

Module = Callable[[str], Any]

MODELS = {
    "": ("monitor.config", "DeepSpeedMonitorConfig"),
    "zero_optimization": ("runtime.zero.config", "DeepSpeedZeroConfig"),
    "fp16": ("runtime.precision_config", "DeepSpeedFP16Config"),
    "bf16": ("runtime.precision_config", "DeepSpeedBF16Config"),
    "hybrid_engine": ("runtime.config", "HybridEngineConfig"),
    "comms_logger": ("comm.config", "CommsLoggerConfig"),
    "weight_quantization": ("inference.config", "WeightQuantConfig"),
    "compile": ("compile.config", "CompileConfig"),
    "tensor_parallel": ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    "timers.throughput": ("utils.config", "DeepSpeedThroughputTimerConfig"),
    "expert_parallel": ("module_inject.auto_ep_presets.base", "AutoEPConfig"),
}

CONSTANTS = (
    "runtime.constants",
    "runtime.activation_checkpointing.config",
    "runtime.swap_tensor.constants",
    "runtime.model_checkpointing.constants",
    "runtime.data_pipeline.constants",
    "profiling.constants",
    "autotuning.constants",
    "comm.constants",
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A key of DeepSpeed's, and its default there; `...` where none is declared."""

    path: str
    default: Any = ...


def declared(module: Module) -> Iterator[Found]:
    """The fields of all models, and the defaults of the one section that is a dict."""
    for name, default in module("runtime.config").get_pipeline_config({}).items():
        yield Found(f"pipeline.{name}", default)
    for section, (where, name) in MODELS.items():
        cls = getattr(module(where), name)
        if dataclasses.is_dataclass(cls):
            for field in dataclasses.fields(cls):
                if field.init:
                    yield Found(_join(section, field.name), _plain(field.default))
        else:
            yield from _fields(cls, section)


def _fields(model: type[BaseModel], section: str) -> Iterator[Found]:
    for name, field in model.model_fields.items():
        default = _plain(field.get_default(call_default_factory=True))
        for one in {name, field.alias or name}:
            path = _join(section, one)
            yield Found(path, default)
            for inner in (field.annotation, *get_args(field.annotation)):
                if inspect.isclass(inner) and issubclass(inner, BaseModel):
                    yield from _fields(inner, path)


def constants(module: Module) -> Iterator[Found]:
    """Pairs of a key and its default; the path is only the last part."""
    for where in CONSTANTS:
        names = vars(module(where))
        for name, key in names.items():
            if isinstance(key, str) and f"{name}_DEFAULT" in names and "\n" not in key:
                yield Found(key, _plain(names[f"{name}_DEFAULT"]))


class Recorder(dict[str, Any]):
    """A dict that notes the path of every key somebody asks it for."""

    def __init__(self, content: dict[str, Any], seen: set[str], section: str = "") -> None:
        super().__init__()
        self.seen, self.section = seen, section
        for key, value in content.items():
            inner = Recorder(value, seen, _join(section, key)) if isinstance(value, dict) else value
            super().__setitem__(key, inner)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(_join(self.section, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(_join(self.section, key))
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(_join(self.section, str(key)))
        return super().__contains__(key)

    def __copy__(self) -> Recorder:
        copied = Recorder({}, self.seen, self.section)
        dict.update(copied, self)
        return copied

    copy = __copy__


def asked_for(module: Module, config: dict[str, Any]) -> set[str]:
    """The paths that DeepSpeed's config class asks `config` for."""
    seen: set[str] = set()
    module("runtime.config").DeepSpeedConfig(Recorder(config, seen))
    return seen


def _plain(value: Any) -> Any:
    """A default as JSON would have it."""
    if isinstance(value, BaseModel):
        return {}
    if isinstance(value, enum.Enum):
        return value.value
    return ... if dataclasses.MISSING is value or "object object" in repr(value) else value


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key
