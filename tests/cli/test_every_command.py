"""What holds for every command: help on one screen, usage errors, completion in a real shell."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from patrickstar.cli import app

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
LINES = 34  # of a screen; a terminal window of today has more
COLUMNS = 80
# What a person reads, or that writes a file which is the answer.
WITHOUT_JSON = {"train", "report", "trace"}
# A switch needs no default, and neither does what says that it is required.
SWITCHES = {"--json", "--debug", "--help", "--remeasure", "--quick", "--checkpoint-activations"}


def shown(*words: str) -> list[str]:
    result = CliRunner().invoke(app, [*words, "--help"], terminal_width=COLUMNS)
    assert result.exit_code == 0
    return result.stdout.splitlines()


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    lines = shown(*filter(None, [command]))
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert any(line.strip().startswith(f"patrickstar {command}") for line in lines[1:])
    assert not any("\\b" in line or "\b" in line for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_names_its_default(command: str) -> None:
    text = "\n".join(shown(command))
    options = text.split("Options:\n", 1)[1]
    entries = re.split(r"\n(?=  -)", options)
    assert len(entries) >= 3
    for entry in entries:
        name = re.search(r"--[\w-]+", entry)
        assert name is not None
        assert name[0] in SWITCHES or "[" in entry.split(name[0], 1)[1], entry


@pytest.mark.parametrize("command", COMMANDS)
def test_a_usage_error_is_exit_code_2_on_standard_error(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--no-such-option"])
    assert result.exit_code == 2
    assert "--no-such-option" in result.stderr
    assert "--help" in result.stderr  # the next step
    assert result.stdout == ""


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - WITHOUT_JSON))
def test_a_command_that_answers_a_question_has_json(command: str) -> None:
    assert any("--json" in line for line in shown(command))


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("do", "doctor"), ("train --model gpt-3", "gpt-300m"), ("plan --machine lap", "laptop-8gb")],
)
def test_bash_completes_with_the_script_that_is_shown(
    tmp_path: Path, typed: str, completed: str
) -> None:
    program = tmp_path / "patrickstar"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m patrickstar "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [str(program), "--show-completion", "bash"], env=environment, capture_output=True, text=True
    )
    assert script.returncode == 0, script.stderr
    # What bash itself does when the key is pressed: it calls the function that the script bound.
    session = script.stdout + (
        "\nbound=$(complete -p patrickstar | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
        f"\nCOMP_WORDS=(patrickstar {typed})\nCOMP_CWORD={len(typed.split())}"
        "\n$bound patrickstar last before"
        '\necho "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash"], input=session, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [completed], done.stderr
