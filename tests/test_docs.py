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
from patrickstar.engine.from_config import settings_from
from patrickstar.machine import machine_from

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


# What is run, made short; what is not, and why, by how the line begins.
SHORT = {
    "patrickstar train ": ["--steps", "2", "--sequence-length", "16"],
    "patrickstar plan ": ["--machine", "laptop-8gb", "--quick", "--sequence-length", "16"],
    "patrickstar report ": [],
    "patrickstar trace ": [],
}
NOT_RUN = {
    "patrickstar doctor ": "writes a GiB to a disk; tests/cli/test_doctor.py runs it on small ones",
    "patrickstar import-checkpoint ": "needs DeepSpeed's files; see tests/cli",
    "patrickstar export-checkpoint ": "needs a run's files; see tests/cli",
    "torchrun ": "needs the reader's script; test_several_gpus_page.py runs the page",
    "srun ": "needs a cluster",
    "first=": "needs a cluster",
    "make setup": "is how these tests got their environment",
    "make lint": "CI runs it",
    "make test": "these tests are it",
    "make soak": "takes up to 40 minutes; tests/soak runs each part in small",
    "make accelerator": "compiles the double; its tests are skipped without it",
    "make docs": "tests/test_site.py builds the site",
    ".venv/bin/python -m pytest ": "these tests are some of them",
    ".venv/bin/python benchmarks/": "takes minutes; its options are tried, and tests/benchmarks",
    "DS_BUILD_OPS=0 .venv/bin/pip ": "CI runs it, see test_what_ci_installs_is_what_a_page_names",
}


def test_a_command_is_run_or_has_a_reason() -> None:
    known = (*SHORT, *NOT_RUN)
    assert [line for line in COMMANDS if not line.startswith(known)] == []
    assert [start for start in known if not any(c.startswith(start) for c in COMMANDS)] == []


def test_the_commands_of_the_pages_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly", reason="the extra `report` is not installed")
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 256}
    Path("config.json").write_text(json.dumps(theirs))
    Path("ds.json").write_text("{}")
    Path("train.py").write_text(
        "from patrickstar.models import GPT, preset\n"
        "def build_model(): return GPT(preset('gpt-tiny'))\n"
    )
    done: set[str] = set()
    for line in COMMANDS:
        options = next((more for start, more in SHORT.items() if line.startswith(start)), None)
        words = shlex.split(line.replace("/scratch", "scratch"), comments=True)[1:]
        if options is None or line in done:
            continue
        if words[0] == "plan" and "--model" in words:
            words[words.index("--model") + 1] = "gpt-tiny"
        done.add(line)
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code == 0, f"{line}: {result.output}"
    assert Path("runs/first.json").exists() and Path("runs/first/report.html").exists()


def test_a_diff_adds_what_its_library_has() -> None:
    for page, language, code in BLOCKS:
        if language == "diff":  # the tests of tests/integrations run whole scripts of this kind
            added = [line[1:].strip() for line in code.splitlines() if line.startswith("+")]
            imports = [line for line in added if line.startswith(("from patrickstar", "import "))]
            exec("\n".join(imports), {})
            assert added, page


def test_a_json_block_is_taken_by_what_it_is_for(tmp_path: Path) -> None:
    for page, language, code in BLOCKS:
        if language == "json" and page == "plan-memory.md":
            file = tmp_path / "machine.json"
            file.write_text(code)
            assert machine_from(file).name == "my machine"
        elif language == "json" and page == "report.md":
            assert load_config(json.loads(code)).patrickstar.record is not None
        elif language == "json" and page == "write-a-policy.md":  # names a module of the reader's
            load_config(json.loads(code))
        elif language == "json" and page == "update-in-backward.md":
            assert settings_from(load_config(json.loads(code))).update_in_backward
        elif language == "json":
            assert page == "migrate-from-deepspeed.md"  # these two have a test of their own


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
