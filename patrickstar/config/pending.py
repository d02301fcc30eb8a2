"""Keys whose meaning is settled and whose value is read here, but that nothing acts on yet.

Such a key would be ignored silently, so asking for something with it is remarked on. Whoever makes
one work deletes its line; a test looks for keys that are read nowhere and have no line.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from patrickstar.config.types import Section
from patrickstar.config.warning import Notes

# By the path of the key: the value that asks for nothing more than what happens anyhow.
ALWAYS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "activation_checkpointing.cpu_checkpointing": False,
    }
)


def remark_on_pending(config: Section, notes: Notes) -> None:
    """Remark on what `config`, as loaded, asks for in vain.

    Only keys that were given count: a default asks for nothing.
    """
    for path, nothing in ALWAYS.items():
        given = _given(config, path)
        if given is not None and given != nothing:
            notes.add(path, "nothing acts on it yet")


def _given(config: Section, path: str) -> Any:
    *sections, name = path.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part, None)
    if section is None or name not in section.model_fields_set:
        return None
    return getattr(section, name)
