"""What the engine itself takes, measured: the time of a small model that hardly computes.

Every use of a parameter passes through Python (its chunk is looked up and pinned, autograd unpacks
it again, its gradient goes to its chunk), and so does every operator. That does not depend on
sizes, so it is measured once on a chain of tiny layers and counted for every moment of a rehearsal.

A chunk that moves costs the thread that computes something beside waiting, too: its pages change
hands. That is measured between two parts of the host's memory, with chunks of two sizes. What comes
from a disk finds memory full, and free pages have been given back to the system to keep the budget,
so as many must be made anew.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from patrickstar.config import load_config
from patrickstar.engine.from_config import settings_from
from patrickstar.engine.initialize import RunSettings, make_engine

_LAYERS, _WIDTH, _WARM_UP, _STEPS = 24, 16, 4, 9
_FRESH, _TRIES = 128 << 20, 3  # bytes
_MOVING, _WIDE = 8, (512, 1024)  # layers, and widths: chunks of 1 and 4 MiB


@dataclass(frozen=True)
class Overhead:
    """Seconds beside what operators compute.

    Attributes:
        moment: of one moment of a rehearsal with every parameter by itself.
        update: of the update of one parameter.
        move, moved_byte: of one chunk that comes or goes, and of each of its bytes.
        fresh_byte: of a byte in a page that the system makes when it is first touched.
    """

    moment: float = 0.0
    update: float = 0.0
    move: float = 0.0
    moved_byte: float = 0.0
    fresh_byte: float = 0.0


def measure_overhead() -> Overhead:
    """Measure it on this machine; takes a second or two."""
    computing, updating, _ = _steps(partial(_chain, _LAYERS, _WIDTH), _WIDTH, _settings())
    # Weight and bias are used together in the forward, the weight again in the backward of all
    # layers but the first, and each has a gradient.
    moments = _LAYERS + _LAYERS - 1 + 2 * _LAYERS
    short, long = (_moving(width) for width in _WIDE)
    sizes = [4 * width * width for width in _WIDE]
    per_byte = max(0.0, (long - short) / (sizes[1] - sizes[0]))
    return Overhead(
        computing / moments,
        updating / (2 * _LAYERS),
        max(0.0, short - per_byte * sizes[0]),
        per_byte,
        _fresh(),
    )


def _fresh() -> float:
    def touched() -> float:
        began = time.perf_counter()
        block = torch.empty(_FRESH, dtype=torch.uint8)  # too long for the heap to keep
        block[:: 1 << 12].fill_(1)
        return time.perf_counter() - began

    return min(touched() for _ in range(_TRIES)) / _FRESH


def _moving(width: int) -> float:
    """Seconds that a chunk of so many weights squared costs when it moves."""
    layers = _MOVING
    provider = partial(_chain, layers, width, bias=False)
    chunk = 4 * width * width
    free = sum(_steps(provider, width, replace(_settings(), chunk_limit=width * width))[:2])
    tight = replace(_settings(), chunk_limit=width * width, device_budget=layers * chunk + chunk)
    computing, updating, moved = _steps(provider, width, tight)
    return max(0.0, computing + updating - free) / max(moved / chunk, 1)


def _settings() -> RunSettings:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.0}}}
    return replace(settings_from(load_config(config)), device=None, device_budget=None)


def _steps(
    provider: Callable[[], nn.Module], width: int, settings: RunSettings
) -> tuple[float, float, float]:
    """Seconds of forward and backward and of the update, and bytes that move, all a step."""
    with torch.random.fork_rng(devices=[]):
        engine, optimizer = make_engine(provider, settings)
    computing, updating = [], []
    moved = 0
    try:
        batch = torch.zeros(2, width)
        for step in range(_WARM_UP + _STEPS):
            if step == _WARM_UP:
                moved = sum(engine.memory_report().moved.values())
            began = time.perf_counter()
            engine.backward(engine(batch).sum())
            middle = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            computing.append(middle - began)
            updating.append(time.perf_counter() - middle)
        moved = sum(engine.memory_report().moved.values()) - moved
    finally:
        engine.close()
    return (
        statistics.median(computing[_WARM_UP:]),
        statistics.median(updating[_WARM_UP:]),
        moved / _STEPS,
    )


def _chain(layers: int, width: int, bias: bool = True) -> nn.Module:
    made = [nn.Sequential(nn.Linear(width, width, bias=bias), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*made)
