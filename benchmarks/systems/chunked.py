"""PatrickStar, as a user calls it.

Options: `memory`, the config's section of that name (`{"host": "2GiB"}`); `disk`, whether there is
a disk tier; `policy`, "planned", "lru" or "fifo"; `precision`, "bf16", "fp16" or "fp32";
`update_in_backward`, with which overflows are not looked for.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.systems import Phases, hyper


def config_of(job: Job) -> dict[str, Any]:
    """The config that the run is started with."""
    memory = dict(job.options.get("memory", {}))
    if job.options.get("disk"):
        memory["disk"] = {"path": job.disk}
    precision = job.options.get("precision", "bf16")
    ours = {"memory": memory, "policy": job.options.get("policy", "planned")}
    config = {
        "train_micro_batch_size_per_gpu": job.sequences,
        "gradient_clipping": job.clipping,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "optimizer": {"type": "AdamW", "params": hyper(job)},
        "patrickstar": ours,
    }
    if job.options.get("update_in_backward"):
        ours["update_in_backward"] = True
        config[precision] = {"enabled": True, "check_grad_overflow": False}
    return config


class ChunkedTrainer:
    def __init__(self, job: Job, config: Any) -> None:
        self.phases = Phases()
        self._left = job.warmup  # steps
        self._before: dict[str, int] = {}  # the peak of every tier until then
        self._activations = 0
        from patrickstar.api import initialize_engine
        from patrickstar.models import GPT

        self.engine, self.optimizer = initialize_engine(
            model_provider=lambda: GPT(config), config=config_of(job)
        )
        self.parameters = sum(p.numel() for p in self.engine.parameters())

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        self.phases.start()
        loss = self.engine(tokens, targets)
        self.phases.mark("forward")
        self.engine.backward(loss)
        self.phases.mark("backward")
        if (first := self.engine.memory.recorded) is not None:
            self._activations = first.peak_other(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.phases.mark("update")
        self._left -= 1
        if self._left == 0:
            self._before = self._peaks()
            self.engine.reset_peak()
        return float(loss.item())

    def _peaks(self) -> dict[str, int]:
        return {name: usage.peak for name, usage in self.engine.memory_report().tiers.items()}

    def moved(self) -> dict[str, int]:
        return dict(self.engine.memory_report().moved)

    def notes(self) -> dict[str, Any]:
        tiers = self.engine.memory_report().tiers
        later = self._peaks()
        return {
            "activations": self._activations,  # the most that was no chunk, in the first step
            "tier_peak": {name: max(n, self._before.get(name, 0)) for name, n in later.items()},
            "tier_peak_later": later,  # from the first step after the warm-up on
            "tier_reserved": {name: usage.reserved for name, usage in tiers.items()},
            "tier_budget": {name: usage.budget for name, usage in tiers.items()},
        }

    def close(self) -> None:
        self.engine.close()


def load() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import patrickstar.api
    import patrickstar.models  # noqa: F401

    try:
        ours = version("patrickstar")
    except PackageNotFoundError:
        ours = "source tree"
    return {"torch": torch.__version__, "patrickstar": ours}


def start(job: Job, config: Any) -> ChunkedTrainer:
    return ChunkedTrainer(job, config)
