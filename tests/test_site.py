"""The documentation builds as a site, without a warning and without anything from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .test_readme import ROOT


@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="the extra `docs` is not installed"
)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    names = {page.stem for page in (ROOT / "docs").glob("*.md")}
    pages = {page.stem: page.read_text() for page in tmp_path.glob("*.html")}
    assert names <= set(pages)
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|link[^>]*stylesheet)[^>]*(?:src|href)="([^"]*)', text)
        assert loaded
        assert not [url for url in loaded if url.startswith(("http", "//"))], name
