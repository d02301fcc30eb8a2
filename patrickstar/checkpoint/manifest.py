"""`state.json`: everything in a checkpoint that is no tensor, and what its files must look like.

    {
      "format": "patrickstar-checkpoint",
      "version": 1,
      "sequence": 7,                              grows with every save into the same folder
      "files": {name: {"bytes": n, "sha256": hex}, ...},
      "state": {...},                             see docs/checkpoint-format.md
      "sha256": hex                               of all of the above, in canonical JSON
    }

Canonical JSON has sorted keys, no spaces and only ASCII; floats are written with the shortest
digits that give them back exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patrickstar.checkpoint.paths import check_name, read_small, write_new
from patrickstar.checkpoint.record import FileRecord
from patrickstar.errors import CheckpointError

FORMAT, VERSION = "patrickstar-checkpoint", 1
NAME = "state.json"
_LONGEST = 128 << 20
_HEX = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """The contents of `state.json`; `state` is JSON."""

    sequence: int
    files: Mapping[str, FileRecord]
    state: dict[str, Any]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the new file `state.json` and wait until it is on the disk.

    Raises:
        CheckpointError: the state is no JSON, or too long.
    """
    body = {
        "format": FORMAT,
        "version": VERSION,
        "sequence": manifest.sequence,
        "files": {n: {"bytes": r.nbytes, "sha256": r.sha256} for n, r in manifest.files.items()},
        "state": manifest.state,
    }
    try:
        text = json.dumps({**body, "sha256": _checksum(body)}, indent=1, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state is not plain JSON: {error}") from error
    data = (text + "\n").encode("ascii")
    if len(data) > _LONGEST:
        raise CheckpointError(
            f"state.json would have {len(data)} bytes, more than {_LONGEST}; keep large data out "
            "of client_state"
        )
    write_new(folder / NAME, data)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `state.json`; the files it names are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, or of a version that is not known.
    """
    path = folder / NAME
    return parse_manifest(read_small(path, _LONGEST), str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Check and understand the contents of `state.json`. Errors as `read_manifest`."""
    try:
        body = json.loads(data.decode("ascii"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where!r} is damaged: it is not JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{where!r} does not belong to a PatrickStar checkpoint")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{where!r} has format version {str(body.get('version'))[:20]}; this PatrickStar reads "
            f"version {VERSION}. Use the PatrickStar that wrote it, or a newer one"
        )
    checksum = body.pop("sha256", None)
    try:
        intact = checksum == _checksum(body)
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{where!r} is damaged: its contents do not match their checksum. "
            "Load an older checkpoint by its tag"
        )
    sequence, files, state = body.get("sequence"), body.get("files"), body.get("state")
    if type(sequence) is not int or not isinstance(files, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{where!r} is incomplete: it needs sequence, files and state")
    return Manifest(sequence, {n: _record(n, r, where) for n, r in files.items()}, state)


def _record(name: str, entry: Any, where: str) -> FileRecord:
    check_name(name, f"a file named in {where!r}")
    if isinstance(entry, dict):
        nbytes, sha256 = entry.get("bytes"), entry.get("sha256")
        if isinstance(nbytes, int) and isinstance(sha256, str) and _HEX.fullmatch(sha256):
            return FileRecord(nbytes, sha256)
    raise CheckpointError(f"{where!r} has no proper record of the file {name!r}")


def _checksum(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
