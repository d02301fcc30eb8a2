"""What `python -m patrickstar` runs."""

from __future__ import annotations

import subprocess
import sys

import patrickstar


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "patrickstar", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"patrickstar {patrickstar.__version__}"
