"""The presets are as large as their names say; counted without memory, on the meta device."""

from __future__ import annotations

import pytest
import torch

from patrickstar.errors import ConfigError
from patrickstar.models import GPT, PRESETS, preset


def parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(preset(name)).parameters())


@pytest.mark.parametrize(
    "name, smallest, largest",
    [
        ("gpt-tiny", 0.5e6, 2e6),
        ("gpt-25m", 25e6, 26e6),
        ("gpt-300m", 302e6, 304e6),
        ("gpt-1b", 1.0e9, 1.1e9),
        ("gpt-4b", 3.9e9, 4.1e9),
    ],
)
def test_a_preset_has_the_size_of_its_name(name: str, smallest: float, largest: float) -> None:
    assert smallest < parameters(name) < largest


def test_every_preset_reads_bytes() -> None:
    assert {config.vocabulary for config in PRESETS.values()} == {256}


def test_the_largest_preset_has_more_than_50_gb_of_state() -> None:
    # bf16 parameter, fp32 master and two fp32 moments: 14 bytes a parameter.
    assert 14 * parameters("gpt-4b") > 50 * 2**30


def test_gpt_300m_is_the_model_of_the_benchmarks() -> None:
    config = preset("gpt-300m")
    assert (config.layers, config.width, config.heads, config.positions) == (24, 1024, 16, 512)


def test_a_misspelt_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'gpt-300m'.*gpt-tiny, gpt-25m"):
        preset("gpt-300")
