"""A recorded run of the real engine, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..engine.test_recording import train


@pytest.fixture(scope="package")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    train(folder, folder / "run")
    return folder / "run"
