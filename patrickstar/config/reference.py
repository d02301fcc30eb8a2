"""The table as a page of documentation: ``python -m patrickstar.config.reference``.

Without an argument the page is printed; with the path of a file it is written there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from patrickstar.config.key import UNSET, Key, Status
from patrickstar.config.keys import TABLE

_HEAD = """\
# DeepSpeed's config, key by key

`patrickstar.initialize_engine` and `patrickstar.initialize` take DeepSpeed's config: a dict, or the
path of a JSON file. This page lists every key of DeepSpeed {version}, and what becomes of it here:

- **honoured**: it does what it does in DeepSpeed.
- **accepted**: it has no effect here, and a `ConfigWarning` says why. All of them come in one
  warning, so that a config can be moved as it is and cleaned up later.
- **rejected**: without its effect the run would be another one, so it is a `ConfigError` that says
  what to use instead.

Values that ask for nothing, such as `false` where that is DeepSpeed's default, and sections whose
`enabled` is `false`, neither warn nor raise. `"auto"` means the default, or what follows from other
keys, as for the batch sizes. A key that is in none of the tables is an error that names the nearest
one.

Defaults are DeepSpeed's, and ours are the same except where the text says so; – means that there is
none. Of {total} keys, {honoured} are honoured, {accepted} accepted and {rejected} rejected. The
page is made from the code by `python -m patrickstar.config.reference docs/deepspeed-config.md`.
"""
_BEFORE_NOTE = {Status.ACCEPTED: "No effect", Status.REJECTED: "Instead"}
_TOP = "The top level"
_OURS = "patrickstar"
_LEGACY = "Keys of the original PatrickStar"


def page() -> str:
    """The whole page, in Markdown."""
    counts = {status: sum(key.status is status for key in TABLE.values()) for status in Status}
    head = _HEAD.format(
        version="0.19.8",
        total=len(TABLE),
        honoured=counts[Status.HONOURED],
        accepted=counts[Status.ACCEPTED],
        rejected=counts[Status.REJECTED],
    )
    return "\n".join([head, *(_section(title, keys) for title, keys in _sections())])


def _sections() -> Iterator[tuple[str, list[Key]]]:
    """Our own section, the top level, each section of DeepSpeed's, and the old keys."""
    old = [key for key in TABLE.values() if _is_legacy(key)]
    rest = [key for key in TABLE.values() if not _is_legacy(key)]
    roots = [key for key in rest if not key.parent]
    ours = [key for key in rest if key.path.split(".")[0] == _OURS]
    below = {root.path: [k for k in rest if k.path.startswith(f"{root.path}.")] for root in roots}
    yield "Our own section: `patrickstar`", ours
    yield _TOP, [root for root in roots if not below[root.path]]
    for root in roots:
        if below[root.path] and root.path != _OURS:
            yield f"`{root.path}`", [root, *below[root.path]]
    yield _LEGACY, old


def _is_legacy(key: Key) -> bool:
    return key.default is UNSET and bool(
        key.path.split(".")[0] == "client"
        or key.path.startswith("use_")
        or key.path in ("default_chunk_size", "release_after_init")
        or key.name == "use_hybrid_adam"
    )


def _section(title: str, keys: Sequence[Key]) -> str:
    lines = [f"## {title}", ""]
    lines += ["| key | default | status | meaning |", "|---|---|---|---|"]
    lines += [f"| `{key.path}` | {_default(key)} | {_status(key)} | {_text(key)} |" for key in keys]
    return "\n".join([*lines, ""])


def _default(key: Key) -> str:
    default = key.default if key.ours is UNSET else key.ours
    return "–" if default is UNSET else f"`{_json(default)}`"


def _json(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**5:
        return f"{value:_}" if value < 10**15 else str(value)
    return json.dumps(value, default=str)


def _status(key: Key) -> str:
    return key.status.value if key.status is Status.HONOURED else f"**{key.status.value}**"


def _text(key: Key) -> str:
    meaning = f"{_capital(key.meaning)}."
    if not key.note:
        return meaning
    if key.status is Status.HONOURED:
        return f"{meaning} {_capital(key.note)}."
    return f"{meaning} *{_BEFORE_NOTE[key.status]}:* {key.note}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def main(arguments: Sequence[str]) -> None:
    """Print the page, or write it to the file named."""
    if arguments:
        Path(arguments[0]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main(sys.argv[1:])
