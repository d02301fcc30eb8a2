"""How fast flat runs are updated, against the bandwidth of a copy on the same machine.

    python benchmarks/optim_update.py [--millions 64] [--threads 2] [--repeats 7] [--json FILE]

An AdamW update with fp32 masters reads a bf16 gradient, reads and writes master and two moments and
writes a bf16 parameter: 28 bytes per parameter; with fp32 parameters and no masters it also moves
28. The bound is the time a plain fp32 copy of as many bytes takes (8 bytes per element: 4 read, 4
written). Each case alternates with that copy, so that both see the same machine; the fastest of
each counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patrickstar.optim import (
    SGD,
    AdamW,
    GradNorm,
    Layout,
    Lion,
    Run,
    Scratch,
    TorchRule,
    UpdateRule,
)


def best_seconds(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """The fastest of `repeats` calls of each, taken in turn, after one that is not counted."""
    best = [float("inf")] * len(works)
    for round_ in range(repeats + 1):
        for index, work in enumerate(works):
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            if round_:
                best[index] = min(best[index], seconds)
    return best


def make_run(
    rule: UpdateRule, numel: int, dtype: torch.dtype, layout: Layout | None = None
) -> tuple[Run, int]:
    """A run with random values, and the bytes that an update of one parameter moves."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(numel, generator=generator) * 0.02
    grad = (torch.randn(numel, generator=generator) * 0.01).to(dtype)
    names = [spec.name for spec in rule.states(rule.defaults)]
    state = {name: torch.zeros(numel).fill_(1e-6) for name in names}
    mixed = dtype != torch.float32
    param = weight.to(dtype) if mixed else weight
    run = Run(param, grad, weight if mixed else None, state, 3, layout)
    per_state = 8 * len(names)
    return run, (2 + 8 + 2 if mixed else 4 + 8) + per_state


def measure(numel: int, repeats: int) -> dict[str, Any]:
    """Rates of each case, in millions of parameters a second and as part of copy bandwidth."""
    source, target = torch.ones(numel), torch.empty(numel).fill_(1.0)
    cases: dict[str, dict[str, float]] = {}
    bf16, fp32 = torch.bfloat16, torch.float32
    adamw = AdamW()
    odd = Layout.of_shapes([(1000, 2049)] * (numel // 2_049_000) + [(7,)] * 64)
    plan: list[tuple[str, UpdateRule, torch.dtype, dict[str, Any], Layout | None]] = [
        ("AdamW bf16", adamw, bf16, {}, None),
        ("AdamW bf16, clipped", adamw, bf16, {"grad_scale": 0.5}, None),
        (
            "AdamW bf16, unscaled and clipped",
            adamw,
            bf16,
            {"grad_scale": (1 / 1024, torch.tensor(0.5))},
            None,
        ),
        (
            "AdamW bf16, clipped in bf16",
            adamw,
            bf16,
            {"grad_scale": 0.5, "scale_in_grad_dtype": True},
            None,
        ),
        ("AdamW bf16, clipped, odd sizes", adamw, bf16, {"grad_scale": 0.5}, odd),
        ("AdamW fp32", adamw, fp32, {}, None),
        ("AdamW fp32, clipped", adamw, fp32, {"grad_scale": 0.5}, None),
        ("SGD bf16, clipped", SGD(), bf16, {"grad_scale": 0.5}, None),
        ("Lion bf16, clipped", Lion(), bf16, {"grad_scale": 0.5}, None),
        ("torch.optim.AdamW wrapped, bf16", TorchRule(torch.optim.AdamW), bf16, {}, None),
    ]
    for name, rule, dtype, how, layout in plan:
        size = numel if layout is None else layout.numel
        run, moved = make_run(rule, size, dtype, layout)
        scratch = Scratch()

        def update(
            rule: UpdateRule = rule,
            run: Run = run,
            how: dict[str, Any] = how,
            scratch: Scratch = scratch,
        ) -> None:
            rule.apply([run], rule.defaults, scratch=scratch, **how)

        copying, seconds = best_seconds([lambda: target.copy_(source), update], repeats)
        bandwidth = 8 * numel / copying
        cases[name] = {
            "params_per_s": size / seconds,
            "bytes_per_s": size * moved / seconds,
            "copy_bytes_per_s": bandwidth,
            "of_copy": size * moved / seconds / bandwidth,
        }
        del run, update
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "parameters": numel,
        "cases": cases,
        "norm_elements_per_s": norms(numel, repeats),
    }


def norms(numel: int, repeats: int) -> dict[str, float]:
    """Elements a second of the per-tensor norms that clipping needs."""
    rates = {}
    for name, arithmetic, dtype, wanted in (
        ("torch, bf16", "torch", torch.bfloat16, None),
        ("torch, bf16 as fp32", "torch", torch.bfloat16, torch.float32),
        ("torch, fp32", "torch", torch.float32, None),
        ("deepspeed, bf16", "deepspeed", torch.bfloat16, None),
    ):
        grads = torch.split((torch.randn(numel) * 0.01).to(dtype), 1 << 22)

        def norm(
            arithmetic: Any = arithmetic, wanted: Any = wanted, grads: Any = grads
        ) -> torch.Tensor:
            total = GradNorm(arithmetic, wanted)
            for index, grad in enumerate(grads):
                total.add(index, grad)
            return total.total()

        rates[name] = numel / best_seconds([norm], repeats)[0]
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--millions", type=float, default=64.0, help="parameters, in millions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result = measure(int(arguments.millions * 1e6), arguments.repeats)
    print(f"{result['parameters']} parameters, {result['threads']} threads")
    for name, case in result["cases"].items():
        rate, copy = case["params_per_s"] / 1e6, case["copy_bytes_per_s"] / 1e9
        print(f"{name:36s} {rate:6.0f} M parameters/s, {case['of_copy']:.2f} of {copy:.1f} GB/s")
    for name, rate in result["norm_elements_per_s"].items():
        print(f"norm {name:31s} {rate / 1e6:8.0f} M elements/s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
