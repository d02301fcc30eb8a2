"""The examples of the integrations run as they stand, in less than the state of their models."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from ..test_readme import ROOT, execute

EXAMPLES = {
    "hugging_face_trainer.py": "transformers",
    "accelerate_loop.py": "accelerate",
    "lightning_trainer.py": "lightning",
}


@pytest.mark.parametrize(("example", "library"), EXAMPLES.items())
def test_an_example_trains_in_less_than_the_state(
    example: str, library: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    result = execute(ROOT / "examples" / example, tmp_path)
    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"loss(?:': '| )([\d.]+)", result.stdout)]
    assert len(losses) >= 4 and losses[-1] < losses[0], result.stdout
    found = re.search(r"state ([\d.]+) MiB, peak on the host ([\d.]+) MiB", result.stdout)
    assert found is not None
    assert float(found[2]) < 0.8 * float(found[1])
