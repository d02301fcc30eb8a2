"""What of the communication is hidden by computing, on a link that the kernel makes slow.

    python -m benchmarks.network --rate 1gbit [--steps 6] [--json FILE]    # as root, on Linux

Two network namespaces are joined by a pair of virtual devices, each with a token bucket filter on
what it sends. In each of them `torchrun --nnodes 2` starts a rank, as on two machines. The counters
of `patrickstar.comm` tell how long collectives ran and how long the computation waited for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HOSTS = ("10.77.0.1", "10.77.0.2")
STAGES = (2, 3)
BATCH, LENGTH = 4, 256
WARM_UP = 3
_PATIENCE = 300.0  # seconds for one run


def train(stage: int, overlap: bool, steps: int) -> dict[str, Any]:
    """One rank's part of a run; its mean seconds of a step."""
    import torch
    import torch.distributed as dist

    import patrickstar
    from patrickstar.models import GPT, GPTConfig

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "overlap_comm": overlap},
        "patrickstar": {"chunk_size": 1 << 20},
    }
    torch.manual_seed(0)
    shape = GPTConfig(layers=4, width=512, heads=8, positions=LENGTH)
    model, optimizer = patrickstar.initialize_engine(lambda: GPT(shape), config)
    comm = model.ranks.comm
    draw = torch.Generator().manual_seed(rank)
    totals = {"step_s": 0.0, "busy_s": 0.0, "waited_s": 0.0}
    for step in range(WARM_UP + steps):
        tokens = torch.randint(0, 256, (BATCH, LENGTH), generator=draw)
        comm.barrier()
        before, began = comm.counters.snapshot(), time.perf_counter()
        loss = model(tokens, tokens.roll(-1, dims=1))
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seconds, after = time.perf_counter() - began, comm.counters.snapshot()
        if step < WARM_UP:
            continue
        totals["step_s"] += seconds
        for name, counted in after.items():
            old = before.get(name)
            totals["busy_s"] += counted.busy_seconds - (old.busy_seconds if old else 0.0)
            totals["waited_s"] += counted.waited_seconds - (old.waited_seconds if old else 0.0)
    parameters = sum(p.numel() for p in model.parameters())
    model.close()
    dist.destroy_process_group()
    means = {name: total / steps for name, total in totals.items()}
    return {"stage": stage, "overlap": overlap, "parameters": parameters, **means}


@contextmanager
def linked_namespaces(rate: str) -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces on a link that sends `rate` in each direction: name and device."""
    names = (f"chunks-{os.getpid()}-0", f"chunks-{os.getpid()}-1")
    devices = tuple(f"ch{os.getpid() % 100000}-{end}" for end in (0, 1))
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for name, device, host in zip(names, devices, HOSTS, strict=True):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", device)
            for one in (device, "lo"):
                _ip("-n", name, "link", "set", one, "up")
            shape = f"dev {device} root tbf rate {rate} burst 256kb latency 50ms".split()
            subprocess.run(["tc", "-n", name, "qdisc", "add", *shape], check=True)
        yield list(zip(names, devices, strict=True))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def measure(rate: str, stage: int, overlap: bool, steps: int) -> dict[str, Any]:
    """The slower rank's times of one run."""
    with linked_namespaces(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        nodes, answers = [], []
        for node, (name, device) in enumerate(hosts):
            answers.append(Path(folder) / f"{node}.json")
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            command += ["--rdzv-endpoint", f"{HOSTS[0]}:29400", "--local-addr", HOSTS[node]]
            # The namespaces have one host name, so neither finds out which of them is the first.
            command += ["--rdzv-conf", f"is_host={int(node == 0)}"]
            command += ["-m", "benchmarks.network", "--stage", str(stage), "--steps", str(steps)]
            command += ["--json", str(answers[-1])] + ([] if overlap else ["--wait"])
            place = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device}
            nodes.append(subprocess.Popen(command, env={**os.environ, **place}))
        try:
            codes = [node.wait(_PATIENCE) for node in nodes]
            if any(codes):
                sys.exit("a rank failed")
        finally:
            for started in nodes:  # nothing may go on in a namespace that is taken away
                started.terminate()
                started.wait()
        return max((json.loads(a.read_text()) for a in answers), key=lambda found: found["step_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc writes it")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--disk", help="accepted: nothing is kept on a disk")
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage is not None:  # one of the ranks
        answer: Any = train(given.stage, not given.wait, given.steps)
    else:
        if sys.platform != "linux" or os.geteuid() != 0:
            sys.exit("not measured: network namespaces need Linux and root")
        if not (shutil.which("ip") and shutil.which("tc")):
            sys.exit("not measured: ip and tc are not installed")
        signal.signal(signal.SIGTERM, _end)  # so that the namespaces are taken away
        runs = [
            measure(given.rate, stage, overlap, given.steps)
            for stage in STAGES
            for overlap in (True, False)
        ]
        answer = {"rate": given.rate, "runs": runs}
    text = json.dumps(answer, indent=1)
    if given.json is not None:
        given.json.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
