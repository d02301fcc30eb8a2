"""Run folders that somebody else may have written, and the pages that are made of them.

Whatever is in the files of a run, they are read as far as they go or refused, and the page has the
elements of any other page: no text of a run becomes an element of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from patrickstar.report.page import page
from patrickstar.report.run import read_run
from soak.models import Spec
from soak.training import config_for, one_step, start

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "'\"&<b>",
    "{{7*7}}${7*7}%s{0}",
    "\u2028\u0000\ud800",
)
_ACTIVE = {"img", "iframe", "object", "embed", "link", "form", "b", "base", "input"}


class Elements(HTMLParser):
    """What elements a page has that could do something."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        handlers = [name for name, _ in attrs if name.startswith("on")]
        if tag in _ACTIVE or handlers:
            self.active.append(tag)


def elements(text: str) -> Elements:
    found = Elements()
    found.feed(text)
    return found


def recorded(folder: Path) -> Path:
    """A recorded run of a few steps."""
    run = folder / "run"
    config = config_for("AdamW", "fp32")
    memory = {"host": 1 << 19, "disk": {"path": str(folder / "spool")}}
    config["patrickstar"] |= {"record": str(run), "memory": memory, "chunk_size": 4000}
    spec = Spec("layers", 32, 1, 1, 1)
    engine, optimizer = start(spec, config)
    for batch in spec.batches(3):
        one_step(engine, optimizer, batch)
    engine.close()
    return run


def reading(run: Path) -> Callable[[tuple[str, bytes]], None]:
    """Reads `run` with one of its files replaced, and makes its page."""
    good = {path.name: path.read_bytes() for path in run.iterdir()}
    usual = elements(page(read_run(run), ""))
    copy = run.with_name("changed")

    def read(given: tuple[str, bytes]) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for name, data in {**good, given[0]: given[1]}.items():
            (copy / name).write_bytes(data)
        found = elements(page(read_run(copy), ""))
        assert found.scripts <= usual.scripts, "a text of the run became a script"
        assert found.active == usual.active, f"a text of the run became an element: {found.active}"

    return read


def with_hostile_text(data: bytes, place: int, text: str) -> bytes:
    """The file with a text in place of one of its texts, or of a number."""
    lines = data.decode().splitlines()
    index = place % len(lines)
    parts = lines[index].split('"')
    if len(parts) > 2:
        inner = 2 * (place % (len(parts) // 2)) + 1
        parts[inner] = json.dumps(text)[1:-1]
    lines[index] = '"'.join(parts)
    return "\n".join(lines).encode()


def inputs(run: Path, changed_bytes: Callable[[bytes], Any]) -> Any:
    """A file of the run, and other bytes for it."""
    good = {path.name: path.read_bytes() for path in run.iterdir()}

    def of(name: str) -> Any:
        hostile = st.builds(
            with_hostile_text,
            st.just(good[name]),
            st.integers(0, 10_000),
            st.sampled_from(HOSTILE),
        )
        return st.tuples(st.just(name), hostile | changed_bytes(good[name]))

    return st.sampled_from(sorted(good)).flatmap(of)
