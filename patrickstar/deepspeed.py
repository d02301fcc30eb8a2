"""Standing for DeepSpeed without changing a script.

    python -m patrickstar.deepspeed train.py --deepspeed_config ds.json

runs `train.py` with every `import deepspeed` and `from deepspeed... import ...` in it answered by
PatrickStar: `deepspeed.NAME` is `patrickstar.NAME`, the same module object. A program can do the
same for itself with `stand_in()` before its first import of DeepSpeed.

Nothing of an installed DeepSpeed is loaded. What has no counterpart is an ImportError or
AttributeError that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_THEIRS, _OURS = "deepspeed", "patrickstar"


class _Finder(MetaPathFinder, Loader):
    """Finds `deepspeed` and everything in it in PatrickStar."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _THEIRS:
            return None
        ours = _OURS + fullname[len(_THEIRS) :]
        if importlib.util.find_spec(ours) is None:
            raise ModuleNotFoundError(
                f"PatrickStar has no counterpart of {fullname!r}", name=fullname
            )
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_OURS + spec.name[len(_THEIRS) :])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Importing writes the alias's spec into the module; it keeps the one it was loaded with.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def stand_in() -> None:
    """From now on `import deepspeed` is PatrickStar, in this process.

    Raises:
        ImportError: DeepSpeed itself has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _THEIRS in sys.modules:
        raise ImportError("DeepSpeed has been imported already; call stand_in() before")
    sys.meta_path.insert(0, _Finder())


def main(arguments: Sequence[str]) -> None:
    """Run the script `arguments[0]` with the rest as its arguments."""
    if not arguments:
        raise SystemExit("usage: python -m patrickstar.deepspeed SCRIPT [ARGUMENT...]")
    stand_in()
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
