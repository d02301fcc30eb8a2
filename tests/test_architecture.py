"""What the two libraries must not know, beyond what import-linter can say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import patrickstar

PACKAGE = Path(__file__).parent.parent / "patrickstar"


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("library", ["memory", "comm"])
def test_the_libraries_know_no_modules_and_no_optimizers(library: str) -> None:
    for path in (PACKAGE / library).rglob("*.py"):
        known = {name for name in imports(path) if name.startswith(("torch.nn", "torch.optim"))}
        assert not known, f"{path.name} imports {known}"


@pytest.mark.parametrize("library", ["memory", "comm"])
def test_importing_a_library_loads_nothing_above_it(library: str) -> None:
    code = (
        f"import sys, patrickstar.{library}\n"
        "names = {n.split('.')[1] for n in sys.modules if n.startswith('patrickstar.')}\n"
        "print(','.join(sorted(names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ",".join(sorted({"errors", "workers", library}))


def test_every_public_name_exists_and_no_other() -> None:
    assert all(hasattr(patrickstar, name) for name in patrickstar.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = patrickstar.no_such_name
