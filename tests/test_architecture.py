"""What the two libraries must not know, beyond what import-linter can say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

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
