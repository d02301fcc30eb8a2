"""The page: whole, self-contained, and with data as nothing but data."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patrickstar.report import page, read_run
from patrickstar.report.page import json_for_html

from .written import events, step, write

NASTY = st.sampled_from(
    [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "'\"><b>bold</b>",
        "<!--<script>",
        "%{y}",
        "{{7*7}}",
        "\u2028\u202e\x00\ufeff",
        "\ud800",
    ]
) | st.text(max_size=30)


class Elements(HTMLParser):
    """What a browser would find."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.data: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        inside = self.tags and self.tags[-1] == "script"
        (self.scripts if inside else self.data).append(data)


def test_the_page_of_a_run_has_every_part_and_loads_nothing(recorded: Path) -> None:
    text = page(read_run(recorded), library="/* plotly */")
    found = Elements(text)
    for part in ("curves", "memory", "timeline", "chunks", "plan", "run"):
        assert f'<section id="{part}">' in text
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert "default-src 'none'" in text
    assert len(text) < 600_000, "without the library"


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_nothing_recorded_becomes_part_of_the_page(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = [data.draw(NASTY) for _ in range(6)]
    tier, kind, why, weight, optimizer, segment = names
    happened: list[dict[str, Any]] = json.loads(json.dumps(events()))
    for event in happened:
        for key, value in (("kind", kind), ("why", why)):
            if key in event:
                event[key] = segment if event["event"] == "segment" else value
        for key in ("tier", "source", "target"):
            if event.get(key) == "host":
                event[key] = tier
        if event["event"] == "memory":
            event["bytes"] = {kind: 5, **event["bytes"]}
    folder = write(
        tmp_path_factory.mktemp("nasty"),
        [step(1)],
        happened,
        tiers=[{"name": tier, "budget": 400}, {"name": "disk"}],
        weights=[{"chunks": [0, 1], "names": [weight], "count": 3}],
        optimizer=optimizer,
    )
    if "\ud800" in "".join(names):
        return  # no file in UTF-8 can hold it, and reading refuses it
    found = Elements(page(read_run(folder), library="1"))
    assert found.tags.count("script") == 3
    assert set(found.tags) & {"img", "iframe", "object", "b"} == set()
    figures = json.loads(found.scripts[0])

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [text for inner in value.values() for text in texts(inner)]
        if isinstance(value, list):
            return [text for inner in value for text in texts(inner)]
        return [value] if isinstance(value, str) else []

    allowed = ("<br>", "<extra></extra>")
    for text in texts(figures):
        for tag in allowed:
            text = text.replace(tag, "")
        assert "<" not in text, "Plotly takes some tags in labels"


def test_a_run_may_be_called_anything(tmp_path: Path) -> None:
    name = "<script>alert(1)<" + "'&\""
    found = Elements(page(read_run(write(tmp_path / name, [step(1)])), library="1"))
    assert found.tags.count("script") == 3
    assert name in "".join(found.data)


@given(value=NASTY)
def test_json_in_a_script_element_reads_back_and_begins_no_tag(value: str) -> None:
    text = json_for_html({"key": value})
    assert json.loads(text) == {"key": value}
    assert not set("<>&\u2028\u2029") & set(text)
