"""Machines from files: one of the user's, or one of those that are shipped, by name."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from patrickstar.errors import ConfigError
from patrickstar.machine.facts import Machine


def shipped_names() -> list[str]:
    """The names of the machines that are shipped."""
    folder = resources.files("patrickstar.machine") / "shipped"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())


def machine_from(given: str | Path) -> Machine:
    """The machine in the file `given`, or the shipped one of that name.

    Raises:
        ConfigError: there is none, or its facts are not such.
    """
    shipped = resources.files("patrickstar.machine") / "shipped" / f"{given}.json"
    source = shipped if str(given) in shipped_names() else Path(given)
    try:
        return Machine.model_validate(json.loads(source.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"the machine file {str(given)!r} is wrong at {where!r}: {first['msg']}. "
            "docs/plan-memory.md shows a complete one"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the machine file {str(given)!r} cannot be read ({error}); give a JSON file, or one "
            f"of the shipped machines: {', '.join(shipped_names())}"
        ) from error
