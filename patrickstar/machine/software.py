"""Checks of the environment: Python, PyTorch, the packages that extras need, a compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from patrickstar.machine.check import Check, State

_OLDEST = (3, 10)
_SYSTEMS = ("Linux", "Darwin")
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(\[[^]]*\])?\s*(>=\s*(?P<least>[\d.]+))?"
    r"\s*(;.*extra == ['\"](?P<extra>\w+))?"
)
_PROGRAM = """
#include <omp.h>
#include <Python.h>
extern "C" int threads() { return omp_get_max_threads(); }
"""
# What extras are for; those that only our own developers need are left out.
EXTRAS = {
    "hf": "Hugging Face models, Trainer and Accelerate",
    "lightning": "Lightning's Trainer",
    "ray": "Ray Train",
    "deepspeed": "chunked optimizer states inside DeepSpeed",
    "report": "`patrickstar report`",
}
Version = Callable[[str], str]


@dataclass(frozen=True)
class Requirement:
    """A package that we need; with `extra`, one that only this extra needs."""

    name: str
    least: str | None
    extra: str | None


def requirements(of: str = "patrickstar") -> list[Requirement] | None:
    """What the installed package asks for; None if it is not installed."""
    try:
        lines = metadata.requires(of) or []
    except metadata.PackageNotFoundError:
        return None
    found = [_REQUIREMENT.match(line) for line in lines]
    return [Requirement(m["name"], m["least"], m["extra"]) for m in found if m is not None]


def check_python(version: tuple[int, ...] = sys.version_info[:3], system: str = "") -> Check:
    """The interpreter, and the system under it."""
    system = system or platform.system()
    found = f"{'.'.join(map(str, version))} on {system} {platform.release()}, {platform.machine()}"
    if version[:2] < _OLDEST:
        return Check(
            "python", State.FAILS, found,
            f"patrickstar needs Python {'.'.join(map(str, _OLDEST))} or newer",
            "make an environment with a newer interpreter",
        )  # fmt: skip
    if system not in _SYSTEMS:
        return Check(
            "python", State.FAILS, found,
            f"chunks move their pages with calls of {' and '.join(_SYSTEMS)}, which {system} lacks",
            "use Linux, or Linux in a virtual machine",
        )  # fmt: skip
    if system != "Linux":
        return Check(
            "python", State.SLOW, found,
            "only Linux moves pages between addresses and goes around the page cache of a disk; "
            "elsewhere both are copied",
            "use Linux where speed matters",
        )  # fmt: skip
    return Check("python", State.FINE, found)


def check_torch(
    needed: Iterable[Requirement],
    version: str = torch.__version__,
    built_for: str | None = None,
    driver: str | None = None,
) -> Check:
    """PyTorch's version, and what it was built for.

    Args:
        built_for: an accelerator's platform, such as "CUDA 12.8"; None for the CPU alone.
        driver: a program that tells of an accelerator's driver, if there is one.
    """
    found = f"{version}, built for {built_for or 'the CPU alone'}"
    least = next((r.least for r in needed if r.name == "torch" and r.extra is None), None)
    if least is not None and _numbers(version) < _numbers(least):
        return Check(
            "torch", State.FAILS, found, f"patrickstar needs {least} or newer",
            f"pip install 'torch>={least}'",
        )  # fmt: skip
    if built_for is None and driver is not None:
        return Check(
            "torch", State.SLOW, found,
            f"there is an accelerator's driver ({driver}), and this build cannot use it",
            "install the build of torch for this accelerator (pytorch.org says how)",
        )  # fmt: skip
    return Check("torch", State.FINE, found)


def platform_of_torch() -> str | None:
    """What this PyTorch was built for beside the CPU."""
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    hip: str | None = getattr(torch.version, "hip", None)
    if hip is not None:
        return f"ROCm {hip}"
    there = torch.accelerator.current_accelerator()
    return None if there is None else there.type


def driver_program() -> str | None:
    """The program that a driver of an accelerator brings with it."""
    programs = ("nvidia-smi", "rocm-smi", "xpu-smi")
    return next((program for program in programs if shutil.which(program)), None)


def check_packages(
    needed: list[Requirement] | None, version: Version = metadata.version
) -> list[Check]:
    """Packages that everything needs, and those that extras need, one check for each extra."""
    if needed is None:
        return [
            Check(
                "packages", State.MISSING, "patrickstar is used from its sources, not installed",
                "what it and its extras need is not known", "pip install .",
            )
        ]  # fmt: skip
    checks = [_packages("packages", None, needed, version)]
    return checks + [_packages(f"extra {extra}", extra, needed, version) for extra in EXTRAS]


def _packages(name: str, extra: str | None, needed: list[Requirement], version: Version) -> Check:
    present, lacking = [], []
    for requirement in needed:
        if requirement.extra != extra:
            continue
        try:
            there = version(requirement.name)
        except metadata.PackageNotFoundError:
            lacking.append(requirement.name)
            continue
        present.append(f"{requirement.name} {there}")
        if requirement.least is not None and _numbers(there) < _numbers(requirement.least):
            lacking.append(f"{requirement.name}>={requirement.least}")
    found = ", ".join(present) or "not installed"
    if not lacking:
        return Check(name, State.FINE, found)
    if extra is None:
        return Check(
            name, State.FAILS, found, f"patrickstar needs {', '.join(lacking)}",
            f"pip install --upgrade {' '.join(repr(package) for package in lacking)}",
        )  # fmt: skip
    return Check(
        name, State.MISSING, found, f"{EXTRAS[extra]} needs {', '.join(lacking)}",
        f"pip install 'patrickstar[{extra}]' if you want it",
    )  # fmt: skip


def check_compiler(accelerator: str | None = None, compiler: str | None = None) -> Check:
    """Whether blocks can be compiled to fused kernels.

    For a CPU PyTorch calls a C++ compiler, so a small library is built with what it includes; for
    CUDA devices it needs Triton as well.

    Args:
        accelerator: type of the device; None computes on the CPU.
        compiler: to try; the one that PyTorch takes by default.
    """
    if accelerator in ("cuda", "xpu") and importlib.util.find_spec("triton") is None:
        return Check(
            "compiler", State.MISSING, "no Triton",
            "torch.compile cannot fuse kernels for this accelerator; training without it works",
            "install triton for this build of torch",
        )  # fmt: skip
    compiler = compiler or os.environ.get("CXX") or _first_compiler()
    if compiler is None:
        return Check(
            "compiler", State.MISSING, "no C++ compiler",
            "torch.compile cannot fuse kernels for the CPU; training without it works",
            "install g++ or clang++",
        )  # fmt: skip
    why = _try_compiler(compiler)
    if why is None:
        return Check("compiler", State.FINE, f"{compiler} builds with OpenMP and Python's headers")
    return Check(
        "compiler", State.MISSING, f"{compiler} fails",
        f"torch.compile cannot fuse kernels for the CPU; training without it works ({why})",
        "install a C++ compiler with OpenMP, and the headers of this Python (python3-dev)",
    )  # fmt: skip


def _first_compiler() -> str | None:
    return next((found for found in ("g++", "clang++") if shutil.which(found)), None)


def _try_compiler(compiler: str) -> str | None:
    """Build what fused kernels are built from; why it fails, if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cpp"
        source.write_text(_PROGRAM)
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-shared", "-fPIC", "-fopenmp", include, str(source)]
        command += ["-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
    return lines[0].strip()


def check_ranks(available: bool, backends: list[str], accelerator: str | None = None) -> Check:
    """Whether several processes can train together.

    Args:
        available: whether PyTorch was built with process groups.
        backends: of them.
    """
    wanted = "nccl" if accelerator == "cuda" else "gloo"
    found = ", ".join(backends) or "no process groups"
    if available and wanted in backends:
        return Check("ranks", State.FINE, found)
    return Check(
        "ranks", State.MISSING, found,
        f"several ranks need torch.distributed with {wanted}; one rank works",
        "install a build of torch with it if you want several",
    )  # fmt: skip


def backends_of_torch() -> tuple[bool, list[str]]:
    """Whether there are process groups, and their backends."""
    from torch import distributed

    if not distributed.is_available():
        return False, []
    there = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return True, [name for name, found in there.items() if found]


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version as numbers: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
