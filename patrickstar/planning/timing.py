"""How long an operator takes: measured on this machine, or bounded by another's rates.

Measured: the operator runs on tensors of its shapes. In a real step weights come from memory, what
was saved for the backward was made long before, and whatever is larger than a core's own cache has
left it, so before every try all arguments are pushed out. The median of a few tries counts: a step
has ordinary ones too. What was measured is kept beside the machine's facts, with what the engine
itself takes (`overhead`).

Bounded: the longer of computing and moving its bytes (the roofline model; Williams, Waterman and
Patterson, "Roofline", CACM 52, 2009). No kernel is faster, and most are slower.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from patrickstar.machine import Machine
from patrickstar.planning.overhead import Overhead, measure_overhead
from patrickstar.planning.work import OperatorKind, TensorKind

_TRIES = 5
_PATIENCE = 0.2  # seconds that all tries may take, but for the first three
_FLUSHED = 64 << 20  # bytes that are touched to empty a processor's own caches
_MOST = 4 << 30  # bytes of arguments; larger operators are bounded instead
_OVERHEAD = tuple(f"the engine, {field.name}" for field in dataclasses.fields(Overhead))
Seconds = Callable[[OperatorKind], float]


def roofline(machine: Machine) -> Seconds:
    """Bounds by the rates of `machine`."""
    processor = machine.computes

    def seconds(kind: OperatorKind) -> float:
        return max(
            kind.flops / processor.flops_of(kind.dtype), kind.nbytes / processor.copy_bytes_per_s
        )

    return seconds


class Measured:
    """Measures kinds of operators on this machine, each once.

    Args:
        otherwise: says what cannot be measured.
        file: where measurements are kept; None keeps none.
        key: of the machine; measurements of another are not used.
    """

    def __init__(self, otherwise: Seconds, file: Path | None, key: str) -> None:
        self._otherwise, self._file, self._key = otherwise, file, key
        self._known: dict[str, float | None] = _read(file, key)
        # By operator and the name of the kind: what it takes, and the kind.
        self._asked: dict[str, dict[str, tuple[float, OperatorKind]]] = {}
        self._flush: torch.Tensor | None = None
        self._changed = False

    def __call__(self, kind: OperatorKind) -> float:
        name = kind.name
        if name not in self._known:
            self._known[name] = self._measure(kind)
            self._changed = True
        known = self._known[name]
        if known is None:
            return self._otherwise(kind)
        self._asked.setdefault(str(kind.func), {})[name] = (known, kind)
        return known

    def guess(self, kind: OperatorKind) -> float:
        """Without measuring: what is known, or as far from its bound as the same operator was on
        the tensors that were asked about before."""
        known = self._known.get(kind.name)
        if known is not None:
            return known
        alike = self._asked.get(str(kind.func), {}).values()
        bounds = sum(self._otherwise(other) for _, other in alike)
        slower = sum(taken for taken, _ in alike) / bounds if bounds else 1.0
        return slower * self._otherwise(kind)

    def overhead(self) -> Overhead:
        """What the engine takes beside operators, measured once."""
        found = [self._known.get(name) for name in _OVERHEAD]
        if None in found:
            measured = measure_overhead()
            found = list(dataclasses.astuple(measured))
            self._known.update(zip(_OVERHEAD, found, strict=True))
            self._changed = True
        return Overhead(*(part or 0.0 for part in found))

    def keep(self) -> None:
        """Write what was measured; a file that cannot be written costs only time."""
        if self._file is None or not self._changed:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as new:
                json.dump({"key": self._key, "seconds": self._known}, new)
            os.replace(new.name, self._file)
        except OSError:
            return

    def _measure(self, kind: OperatorKind) -> float | None:
        tensors = [leaf for leaf in kind.leaves if isinstance(leaf, TensorKind)]
        if sum(tensor.nbytes for tensor in tensors) > _MOST:
            return None
        rows = [t.shape[0] for t in tensors if t.dtype.is_floating_point and t.shape]
        try:
            with torch.no_grad():
                leaves = [_real(leaf, min(rows, default=1)) for leaf in kind.leaves]
                args, kwargs = tree_unflatten(leaves, kind.structure)
                taken = []
                for _ in range(_TRIES):
                    self._empty_caches()
                    began = time.perf_counter()
                    kind.func(*args, **kwargs)
                    taken.append(time.perf_counter() - began)
                    if len(taken) > 2 and sum(taken) > _PATIENCE:
                        break
        except Exception:  # an operator that wants other values than these
            return None
        return statistics.median(taken[1:])

    def _empty_caches(self) -> None:
        if self._flush is None:
            self._flush = torch.zeros(_FLUSHED // 4)
        self._flush.add_(1)


def _real(leaf: Any, rows: int) -> Any:
    if not isinstance(leaf, TensorKind):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype)
    if leaf.dtype.is_floating_point:
        return made.normal_()
    if leaf.dtype is torch.bool:
        return made.fill_(True)
    return made.random_(0, max(rows, 1))  # an index into the first dimension of another argument


def _read(file: Path | None, key: str) -> dict[str, float | None]:
    try:
        kept = json.loads(file.read_text()) if file is not None else {}
        known = kept["seconds"] if kept.get("key") == key else {}
        return {str(name): None if s is None else float(s) for name, s in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
