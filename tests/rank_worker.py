"""One rank of the test pool: runs functions of test modules, each in a process group of its own.

Started by `rank_pool.py` as `python rank_worker.py SOCKET`. A message names a function by file and
name, so it does not matter how pytest imports test modules.
"""

from __future__ import annotations

import datetime
import importlib.util
import pickle
import sys
import traceback
from multiprocessing.connection import Client
from types import ModuleType

import torch
import torch.distributed as dist


def main(address: str) -> None:
    torch.set_num_threads(1)
    modules: dict[str, ModuleType] = {}
    with Client(address) as parent:
        while (message := parent.recv()) is not None:
            path, name, rank, size, store, arguments = message
            try:
                if path not in modules:
                    modules[path] = load(path)
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(store, size),
                    rank=rank,
                    world_size=size,
                    timeout=datetime.timedelta(seconds=60),
                )
                answer = (True, getattr(modules[path], name)(rank, size, *arguments))
            except BaseException:
                answer = (False, traceback.format_exc())
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
            # Plain pickling: a Connection's own would pass tensors by file descriptor.
            parent.send_bytes(pickle.dumps(answer))


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"on_a_rank_{abs(hash(path))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
