"""Files of the repository that pages link to, such as examples, belong to the site as well.

On a page of `docs/` they are `../examples/x.py`; in the site they are copied to `examples/x.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Take in what the pages link to outside of `docs/`."""
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for target in _OUTSIDE.findall(page.content_string):
            name = target if Path(target).suffix != ".md" else f"{target}.txt"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(root / target)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to the copies."""
    return _OUTSIDE.sub(
        lambda found: "](" + found[1] + (".txt" if found[1].endswith(".md") else ""), markdown
    )
