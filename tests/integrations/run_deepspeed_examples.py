"""Runs DeepSpeed's scripts one after the other in this process, under one of the two imports.

    python run_deepspeed_examples.py patrickstar|deepspeed OUTPUT SCRIPT...

writes to the JSON file OUTPUT what each script printed of its steps, as rows of step, name and
value, or the error that ended it. One process, since importing takes longer than any script.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROW = re.compile(r"^step (\d+) (\S+) (\S+)$", re.MULTILINE)


def run(script: str) -> dict[str, Any]:
    printed, began = io.StringIO(), time.monotonic()
    sys.argv = [script]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except BaseException:
        return {"error": traceback.format_exc()}
    found = ROW.findall(printed.getvalue())
    rows = [[int(step), name, float(value)] for step, name, value in found]
    return {"rows": rows, "seconds": time.monotonic() - began}


def main(under: str, output: str, scripts: list[str]) -> None:
    if under == "patrickstar":
        from patrickstar.deepspeed import stand_in

        stand_in()
    Path(output).write_text(json.dumps({script: run(script) for script in scripts}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
