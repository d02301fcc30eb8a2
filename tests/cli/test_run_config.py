"""Where a run's config comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from patrickstar.cli.run_config import Overrides, disk_place, micro_batch_size, run_config
from patrickstar.errors import ConfigError


def written(tmp_path: Path, config: Any) -> Path:
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


def test_without_a_file_training_is_bf16_adamw_with_clipping_and_warm_up() -> None:
    config = run_config(None, Overrides())
    assert config["bf16"] == {"enabled": True}
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert config["optimizer"]["params"]["weight_decay"] == 0.1
    assert config["gradient_clipping"] == 1.0
    assert config["scheduler"]["type"] == "WarmupLR"
    assert "patrickstar" not in config


def test_budgets_of_the_command_line_win_over_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {"patrickstar": {"policy": "lru", "memory": {"host": "8GiB", "device": "2GiB"}}},
    )
    config = run_config(file, Overrides(host_memory="1GiB", disk="/scratch:4GiB"))
    assert config["patrickstar"] == {
        "policy": "lru",
        "memory": {
            "host": "1GiB",
            "device": "2GiB",
            "disk": {"path": "/scratch", "size": "4GiB"},
        },
    }


@pytest.mark.parametrize(
    "place, expected",
    [
        ("/scratch", {"path": "/scratch"}),
        ("/scratch:20GiB", {"path": "/scratch", "size": "20GiB"}),
        ("/scratch:auto", {"path": "/scratch", "size": "auto"}),
        ("odd:name", {"path": "odd:name"}),
        ("odd:name:1MB", {"path": "odd:name", "size": "1MB"}),
    ],
)
def test_a_disk_is_a_folder_with_perhaps_a_size(place: str, expected: dict[str, str]) -> None:
    assert disk_place(place) == expected


def test_a_disk_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a folder"):
        disk_place("")


def test_a_batch_size_of_the_command_line_replaces_both_of_the_files(tmp_path: Path) -> None:
    file = written(tmp_path, {"train_batch_size": 32, "gradient_accumulation_steps": 4})
    assert micro_batch_size(run_config(file, Overrides())) == 8
    config = run_config(file, Overrides(batch_size=2))
    assert micro_batch_size(config) == 2 and "train_batch_size" not in config


def test_a_file_that_gives_no_batch_size_trains_one_sequence_at_a_time(tmp_path: Path) -> None:
    config = run_config(written(tmp_path, {}), Overrides())
    assert config == {"train_micro_batch_size_per_gpu": 1}


def test_a_learning_rate_scales_the_warm_up_with_it() -> None:
    config = run_config(None, Overrides(learning_rate=3e-3))
    params = config["scheduler"]["params"]
    assert config["optimizer"]["params"]["lr"] == 3e-3
    assert params["warmup_max_lr"] == 3e-3
    assert params["warmup_min_lr"] == pytest.approx(3e-3 / 20)


def test_a_learning_rate_that_the_schedule_would_ignore_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}})
    with pytest.raises(ConfigError, match="'OneCycle'"):
        run_config(file, Overrides(learning_rate=1e-3))


@pytest.mark.parametrize("text, match", [("{", "is no JSON"), ("[1]", "holds a list")])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        run_config(written(tmp_path, text), Overrides())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json.*cannot be read"):
        run_config(tmp_path / "absent.json", Overrides())


def test_a_section_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"patrickstar\.memory in the config is 3"):
        run_config(written(tmp_path, {"patrickstar": {"memory": 3}}), Overrides(host_memory="1GiB"))
