"""A device that does everything as late as it may: an accelerator's double, to find missing waits.

Importing this module builds the extension beside it (a C++ compiler, once) and makes it this
process's accelerator under the name "late". What it computes is what the CPU computes. The
rest of the tests must not see it, so tests that need it run in processes of their own:

    python -m pytest -p tests.accelerator.late tests/engine/test_on_an_accelerator.py
    python -m tests.accelerator.late train --steps 5        # as `patrickstar train --steps 5`

The environment says how:

- `LATE_SCHEDULE`: `late` (the default), `eager` or `random:SEED`; see `schedule.h`.
- `LATE_PATIENCE`: milliseconds after which a device goes on that nobody waits for; 0 is never.
- `LATE_DEVICES`, `LATE_MEMORY`: how many devices there are; bytes of each.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

NAME = "late"
SOURCES = ("device.cpp", "kernels.cpp", "collectives.cpp")


def built() -> Any:
    """The extension, compiled if its sources have changed since it was."""
    folder = Path(__file__).parent
    name = "late_device"
    made = Path(cpp_extension._get_build_directory(name, verbose=False))
    with open(made / "building", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        # PyTorch's own lock is a file, which a build that was killed leaves behind: then the next
        # one would wait for ever.
        (made / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            name,
            [str(folder / source) for source in SOURCES],
            extra_cflags=["-O1", "-g0", "-fvisibility=hidden"],
            with_cuda=False,
        )


def device_module(device: Any, devices: int) -> ModuleType:
    """What `torch.late` is: the functions that PyTorch asks a device's module for."""
    module = ModuleType(f"torch.{NAME}")
    generators = [device.default_generator(index) for index in range(devices)]

    def number(of: Any) -> int:
        index = torch.device(NAME, of).index if isinstance(of, int) else torch.device(of).index
        return torch.accelerator.current_device_index() if index is None else index

    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        return generators[number(device)].get_state()

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        generators[number(device)].set_state(state)

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def manual_seed(seed: int) -> None:
        generators[number(NAME)].manual_seed(seed)

    module.default_generators = tuple(generators)
    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.manual_seed, module.manual_seed_all = manual_seed, manual_seed_all
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: devices  # PyTorch asks here
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.synchronize = torch.accelerator.synchronize
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def page_lock(found: Callable[[torch.device], Any], device: Any) -> Callable[[torch.device], Any]:
    """`patrickstar.memory.pinned.page_lock` that knows this device too."""

    def lock_for(of: torch.device) -> Any:
        if of.type != NAME:
            return found(of)

        def lock(address: int, nbytes: int) -> Callable[[], None]:
            device.lock(address, nbytes)
            return lambda: device.unlock(address)

        return lock

    return lock_for


def register() -> Any:
    """Make the device this process's accelerator."""
    device = built()
    kind, _, seed = os.environ.get("LATE_SCHEDULE", "late").partition(":")
    devices = int(os.environ.get("LATE_DEVICES", "1"))
    device.choose(kind, int(seed or 0), int(os.environ.get("LATE_PATIENCE", "0")))
    device.set_devices(devices)
    device.set_memory(int(os.environ.get("LATE_MEMORY", 1 << 30)))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module(device, devices))
    torch.utils.generate_methods_for_privateuse1_backend()
    if dist.is_available():
        dist.Backend.register_backend(
            NAME,
            lambda store, rank, size, timeout: device.collectives(
                dist.ProcessGroupGloo(store, rank, size, timeout)
            ),
            devices=[NAME],
        )
    pinned = importlib.import_module("patrickstar.memory.pinned")
    changed = page_lock(pinned.page_lock, device)
    for user in ("memory.pinned", "engine.initialize", "cli.doctor"):
        importlib.import_module(f"patrickstar.{user}").page_lock = changed
    return device


DEVICE = register()

if __name__ == "__main__":
    from patrickstar.__main__ import main

    sys.exit(main())
