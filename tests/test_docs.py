"""The pages are true: their code runs, their commands parse, their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patrickstar.cli import app
from patrickstar.config import load_config

from .test_readme import ROOT, execute

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
BLOCKS = [
    (page.name, language, code)
    for page in PAGES
    for language, code in re.findall(
        r"^ *```(\w+)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    )
]
# Pages whose code needs several processes run in a test of their own.
OWN_TEST = {"comm.md", "several-gpus.md"}
PYTHON = [(page, code) for page, language, code in BLOCKS if language == "python"]


@pytest.mark.parametrize(
    ("page", "code"), [(p, c) for p, c in PYTHON if p not in OWN_TEST], ids=lambda v: v[:20]
)
def test_a_python_block_runs_as_it_stands(page: str, code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code)
    result = execute(script, tmp_path)
    assert result.returncode == 0, result.stderr


COMMANDS = [
    line
    for _, language, code in BLOCKS
    if language == "bash"
    for line in code.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


def test_a_block_is_of_a_language_that_is_tried() -> None:
    # A diff shows what changes in a script; the examples are the scripts.
    tried = {"python", "bash", "json", "diff"}
    assert {language for _, language, _ in BLOCKS} <= tried


def test_a_command_is_one_that_can_be_tried_or_belongs_to_a_cluster() -> None:
    tried = ("patrickstar ", "make ", ".venv/bin/python ")
    cluster = ("torchrun ", "srun ", "first=")
    # CI runs what installs DeepSpeed; test_what_ci_installs_is_what_a_page_names.
    kinds = (*tried, *cluster, "DS_BUILD_OPS=0 .venv/bin/pip install deepspeed==")
    assert [line for line in COMMANDS if not line.startswith(kinds)] == []


def test_what_ci_installs_is_what_a_page_names() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    named = {word for line in COMMANDS for word in line.split() if word.startswith("deepspeed==")}
    assert len(named) == 1 and named.pop() in ci


def test_make_targets_and_scripts_that_a_page_names_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in (shlex.split(line, comments=True) for line in COMMANDS):
        if words[0] == "make":
            assert words[1] in targets
        if words[0] == ".venv/bin/python" and words[1] != "-m":
            shown = execute(ROOT / words[1], ROOT, "--help").stdout
            assert all(option in shown for option in words if option.startswith("--"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("patrickstar ")])
def test_an_option_that_a_page_names_exists(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    options = [word for word in words if word.startswith("--")]
    shown = CliRunner().invoke(app, [words[0], "--help"], terminal_width=200).stdout
    assert all(option in shown for option in options), shown


@pytest.mark.filterwarnings("ignore::patrickstar.config.warning.ConfigWarning")
def test_the_configs_to_move_over_are_accepted_before_and_after(tmp_path: Path) -> None:
    found = [json.loads(code) for page, language, code in BLOCKS
             if page == "migrate-from-deepspeed.md" and language == "json"]  # fmt: skip
    before, after = (load_config(config) for config in found)
    assert before.zero_optimization.stage == after.zero_optimization.stage == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(found[1])


def test_json_blocks_are_json() -> None:
    for _, language, code in BLOCKS:
        if language == "json":
            json.loads(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_example_without_modules_keeps_every_row(tmp_path: Path) -> None:
    result = execute(ROOT / "examples" / "embedding_table.py", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "of 4" in result.stdout
