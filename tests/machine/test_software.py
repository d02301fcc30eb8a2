"""What the environment is judged to be."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from patrickstar.machine import software
from patrickstar.machine.check import Check, State, worst
from patrickstar.machine.software import Requirement

NEEDED = [
    Requirement("torch", "2.11", None),
    Requirement("rich", "13.7", None),
    Requirement("transformers", "4.56", "hf"),
    Requirement("peft", "0.17", "hf"),
]


def versions(**known: str) -> software.Version:
    def version(name: str) -> str:
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    return version


def test_an_old_interpreter_and_a_strange_system_fail() -> None:
    assert software.check_python((3, 9, 1), "Linux").state is State.FAILS
    assert software.check_python((3, 12, 0), "Windows").state is State.FAILS
    assert software.check_python((3, 12, 0), "Darwin").state is State.SLOW
    assert software.check_python((3, 10, 0), "Linux").state is State.FINE


@pytest.mark.parametrize(
    ("version", "built", "driver", "state"),
    [
        ("2.13.0+cpu", None, None, State.FINE),
        ("2.9.1", "CUDA 12.8", None, State.FAILS),  # 9 is less than 11
        ("2.13.0+cpu", None, "nvidia-smi", State.SLOW),
        ("2.13.0", "CUDA 12.8", "nvidia-smi", State.FINE),
    ],
)
def test_torch_is_judged_by_version_and_by_what_it_was_built_for(
    version: str, built: str | None, driver: str | None, state: State
) -> None:
    assert software.check_torch(NEEDED, version, built, driver).state is state


def test_what_everything_needs_fails_and_what_an_extra_needs_is_missing() -> None:
    checks = {c.name: c for c in software.check_packages(NEEDED, versions(torch="2.13", peft="1"))}
    assert checks["packages"].state is State.FAILS
    assert "rich" in checks["packages"].why and "torch" not in checks["packages"].why
    assert checks["extra hf"].state is State.MISSING
    assert "patrickstar[hf]" in checks["extra hf"].advice
    assert checks["extra hf"].found == "peft 1"


def test_a_package_that_is_too_old_is_named_with_the_version_it_needs() -> None:
    known = versions(torch="2.13", rich="13.10.1", transformers="4.9", peft="0.17")
    checks = {c.name: c for c in software.check_packages(NEEDED, known)}
    assert checks["packages"].state is State.FINE
    assert "transformers>=4.56" in checks["extra hf"].why


def test_sources_that_are_not_installed_say_so() -> None:
    assert software.requirements("no-such-package-of-anybody") is None
    (check,) = software.check_packages(None)
    assert check.state is State.MISSING


def test_the_extras_that_are_told_of_are_those_of_the_package() -> None:
    asked = software.requirements()
    if asked is None:
        pytest.skip("patrickstar is not installed here")
    assert set(software.EXTRAS) <= {requirement.extra for requirement in asked}
    torch = next(r for r in asked if r.name == "torch" and r.extra is None)
    assert torch.least is not None


def test_a_compiler_that_cannot_build_a_kernel_is_found_out(tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    check = software.check_compiler(None, str(broken))
    assert check.state is State.MISSING
    assert "no such header" in check.why
    assert software.check_compiler(None, str(tmp_path / "none")).state is State.MISSING


def test_process_groups_without_the_backend_of_the_device_are_missing() -> None:
    assert software.check_ranks(True, ["gloo"]).state is State.FINE
    assert software.check_ranks(True, ["gloo"], "cuda").state is State.MISSING
    assert software.check_ranks(False, []).state is State.MISSING


def test_the_worst_check_decides() -> None:
    fine, slow = Check("a", State.FINE, ""), Check("b", State.SLOW, "")
    assert worst([]) is State.FINE
    assert worst([slow, fine]) is State.SLOW
    assert worst([slow, Check("c", State.FAILS, ""), fine]) is State.FAILS
