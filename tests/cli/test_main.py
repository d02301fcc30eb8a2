"""What `python -m patrickstar` runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import patrickstar
from patrickstar.cli import app


def test_the_module_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "patrickstar", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"patrickstar {patrickstar.__version__}"


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("patrickstar tr", {"train", "trace"}),
        ("patrickstar train --host", {"--host-memory"}),
        ("patrickstar train --model gpt-3", {"gpt-300m"}),
        ("patrickstar plan --model gpt-", {"gpt-tiny", "gpt-25m", "gpt-300m", "gpt-1b", "gpt-4b"}),
    ],
)
def test_a_shell_completes_commands_options_and_presets(typed: str, expected: set[str]) -> None:
    asked = {
        "_PATRICKSTAR_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = CliRunner(env=asked).invoke(app, [], prog_name="patrickstar")
    assert set(done.stdout.split()) == expected, done.output
