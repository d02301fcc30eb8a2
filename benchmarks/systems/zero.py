"""DeepSpeed ZeRO-3 with its compiled CPU kernels.

Options: `zero`, its config section "zero_optimization"; `aio`, its section of that name;
`zero_init`, whether the model is built under `deepspeed.zero.Init`; `remote`, the device given to
that.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job
from benchmarks.systems import Phases, hyper


def config_of(job: Job) -> dict[str, Any]:
    """DeepSpeed's config; what goes to disk goes into the job's folder."""
    zero = copy.deepcopy(job.options["zero"])
    for section in ("offload_param", "offload_optimizer"):
        if zero.get(section, {}).get("device") == "nvme":
            zero[section]["nvme_path"] = job.disk
    config = {
        "train_micro_batch_size_per_gpu": job.sequences,
        "gradient_clipping": job.clipping,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": hyper(job)},
        "zero_optimization": zero,
    }
    if "aio" in job.options:
        config["aio"] = dict(job.options["aio"])
    return config


class ZeroTrainer:
    def __init__(self, job: Job, config: Any) -> None:
        self.phases = Phases()
        import deepspeed

        from patrickstar.models import GPT

        self.folder = Path(job.disk)
        settings = config_of(job)
        if job.options.get("zero_init"):
            remote = job.options.get("remote")
            with deepspeed.zero.Init(config_dict_or_path=settings, remote_device=remote):
                model = GPT(config)
            self.parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        else:
            model = GPT(config)
            self.parameters = sum(p.numel() for p in model.parameters())
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        self.phases.start()
        loss = self.engine(tokens, targets)
        self.phases.mark("forward")
        self.engine.backward(loss)
        self.phases.mark("backward")
        self.engine.step()
        self.phases.mark("update")
        return float(loss.item())

    def moved(self) -> dict[str, int]:
        return {}

    def notes(self) -> dict[str, Any]:
        basic = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"optimizer": type(basic).__name__, "spool_bytes": _size(self.folder)}

    def close(self) -> None:
        pass  # the job's folder goes with the job


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def load() -> dict[str, str]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    import deepspeed

    import patrickstar.models  # noqa: F401

    return {"torch": torch.__version__, "deepspeed": deepspeed.__version__}


def start(job: Job, config: Any) -> ZeroTrainer:
    return ZeroTrainer(job, config)


def build() -> None:
    """Compile the kernels, so that no row waits for a compiler."""
    load()
    from deepspeed.accelerator import get_accelerator

    for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
        get_accelerator().create_op_builder(name).load()


if __name__ == "__main__":
    build()
