"""Write the table of docs/reliability.md from soak/results: `python -m soak.render`.

The page holds prose and, between `<!-- table -->` and `<!-- end -->`, what this program puts there.
`--check` changes nothing and fails if the page is not what it would write.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
_TABLE = re.compile(r"(<!-- table -->\n).*(<!-- end -->)", re.DOTALL)


def table(results: list[dict[str, Any]]) -> str:
    """The rows of all parts, and how they were made."""
    if not results:
        return "Not run yet.\n"
    lines = [
        "| part | what was tried | tried | survived | lost | seen |",
        "|---|---|--:|--:|--:|---|",
    ]
    tried = lost = 0
    for result in results:
        for row in result["tallies"]:
            seen = "; ".join(f"{name}: {_number(value)}" for name, value in row["seen"].items())
            failures = len(row["lost"])
            tried, lost = tried + row["tried"], lost + failures
            lines.append(
                f"| {result['part']} | {row['what']} | {row['tried']:,} | "
                f"{row['tried'] - failures:,} | {failures:,} | {seen} |"
            )
    lines += [f"| | **all** | {tried:,} | {tried - lost:,} | {lost:,} | |", ""]
    minutes = sum(result["seconds"] for result in results) / 60
    versions = sorted({f"Python {r['python']}, PyTorch {r['torch']}" for r in results})
    lines.append(
        f"{minutes:.0f} minutes in all, one part after another, with {'; '.join(versions)}."
    )
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def rendered(page: str, results: Path) -> str:
    """`page` with the table of what lies in the folder `results`."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    made = table(found)
    return _TABLE.sub(lambda match: match[1] + made + match[2], page)


def render(results: Path) -> None:
    PAGE.write_text(rendered(PAGE.read_text(), results))


def main() -> int:
    results = ROOT / "soak" / "results"
    if "--check" in sys.argv[1:]:
        page = PAGE.read_text()
        return int(page != rendered(page, results))
    render(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
