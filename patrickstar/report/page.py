"""The report as one HTML file that needs no network.

Plotly's library and the figures are inside. What was recorded reaches the page in two ways only:
as text that is escaped, and as JSON in a data block in which no tag can begin. A content security
policy allows the scripts that are here, by their hashes, and nothing from anywhere else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from patrickstar.errors import PatrickStarError
from patrickstar.report.run import Run
from patrickstar.report.sections import Section, Table, sections, tiles


class NoPlotlyError(PatrickStarError, ImportError):
    """The extra `report` is not installed."""


def page(run: Run, library: str | None = None) -> str:
    """The whole page.

    Args:
        library: the JavaScript of Plotly; that of the package `plotly` if not given.

    Raises:
        NoPlotlyError: the package is needed and not installed.
    """
    library = plotly_js() if library is None else library
    here = resources.files("patrickstar.report")
    style = (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    parts = sections(run)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(library)} {_hash(script)}",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
        )
    )
    figures = [figure for section in parts for _, figure in section.figures]
    name = html.escape(run.name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{name} - PatrickStar report</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{name}</h1>
<p class="sub">{_subtitle(run)}</p>
<nav>{"".join(f'<a href="#{part.id}">{part.title}</a>' for part in parts)}</nav>
</header>
<main>
{_notices(run.notices)}
<dl class="tiles">{"".join(_tile(*tile) for tile in tiles(run))}</dl>
<noscript><p class="notice">The figures need JavaScript, which is switched off.</p></noscript>
{_sections(parts)}
</main>
<script type="application/json" id="figures">{json_for_html(figures)}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def plotly_js() -> str:
    """Plotly's JavaScript, from the package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise NoPlotlyError(
            "the report needs Plotly, which is not installed; "
            'install it with pip install "patrickstar[report]"'
        ) from error
    return str(get_plotlyjs())


def json_for_html(value: Any) -> str:
    """`value` as JSON that can stand inside a script element: no tag or comment begins in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _subtitle(run: Run) -> str:
    facts = run.facts.model_extra or {}
    parts = []
    parameters = facts.get("parameters")
    if isinstance(parameters, int):
        parts.append(f"{parameters / 1e6:,.1f}M parameters")
    texts = [facts.get(key) for key in ("precision", "optimizer", "started")]
    parts += [_time(text[:60]) for text in texts if isinstance(text, str)]
    return html.escape(" · ".join(parts))


def _time(text: str) -> str:
    """A time as people write it; any other text as it is."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d):\d\d\+00:00", text)
    return f"{found[1]} {found[2]} UTC" if found else text


def _notices(notices: Sequence[str]) -> str:
    return "".join(f'<p class="notice">{html.escape(notice)}</p>' for notice in notices)


def _tile(name: str, value: str) -> str:
    return f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"


def _sections(parts: Sequence[Section]) -> str:
    written: list[str] = []
    number = 0
    for part in parts:
        figures: list[str] = []
        for name, figure in part.figures:
            height = int(figure["layout"]["height"])
            title = f"<h3>{html.escape(name)}</h3>" if len(part.figures) > 1 else ""
            figures.append(
                f'<figure aria-label="{html.escape(name)}">{title}<div class="plot" '
                f'data-figure="{number}" style="height:{height}px"></div></figure>'
            )
            number += 1
        kind = "figures paired" if part.paired else "figures"
        text = f"<p>{html.escape(part.text)}</p>" if part.text else ""
        table = "" if part.table is None else _table(part.table)
        written.append(
            f'<section id="{part.id}"><h2>{html.escape(part.title)}</h2>{text}{table}'
            f'<div class="{kind}">{"".join(figures)}</div></section>'
        )
    return "\n".join(written)


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in table.head)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in table.rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{rows}</tbody></table></div>'
