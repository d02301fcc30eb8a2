"""What is said before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import patrickstar.cli
from patrickstar.__main__ import main


@pytest.mark.parametrize("given, expected", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_openmp_threads_sleep_while_they_wait_unless_told_otherwise(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    seen: list[str | None] = []
    monkeypatch.setattr(
        patrickstar.cli, "app", lambda prog_name: seen.append(os.environ.get("OMP_WAIT_POLICY"))
    )
    main()
    assert seen == [expected]


def test_nothing_imports_torch_before_main_runs() -> None:
    code = "import sys, patrickstar.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
