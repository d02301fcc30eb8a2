"""Reading a config from a dict or a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from patrickstar.config import load_config
from patrickstar.errors import ConfigError

WHOLE = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": True},
    "patrickstar": {"memory": {"host": "2GiB", "disk": {"path": "/scratch", "size": "1TiB"}}},
}


def write(folder: Path, text: str) -> Path:
    file = folder / "config.json"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(config)
    return str(raised.value)


def test_a_file_says_what_the_dict_in_it_says(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(WHOLE))
    assert load_config(file) == load_config(WHOLE) == load_config(str(file))


def test_the_input_is_not_changed() -> None:
    before = copy.deepcopy(WHOLE)
    config = load_config(WHOLE)
    assert before == WHOLE
    config.optimizer.params["lr"] = 1.0  # type: ignore[union-attr]
    assert before == WHOLE


def test_changing_the_input_later_does_not_change_the_config() -> None:
    given = copy.deepcopy(WHOLE)
    config = load_config(given)
    given["optimizer"]["params"]["betas"][0] = 0.0  # type: ignore[index]
    assert tuple(config.optimizer.params["betas"]) == (0.9, 0.95)  # type: ignore[union-attr]


def test_a_config_cannot_be_changed() -> None:
    config = load_config(WHOLE)
    for section, name in ((config, "gradient_clipping"), (config.patrickstar.memory, "host")):
        with pytest.raises(Exception, match="frozen"):
            setattr(section, name, 1)


def test_any_mapping_is_taken() -> None:
    assert load_config(MappingProxyType(WHOLE)) == load_config(WHOLE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.json" in refusal(tmp_path / "nowhere.json")


def test_a_folder_is_no_config(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)


def test_broken_json_is_told_with_line_and_column(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, '{\n  "bf16": {"enabled": true},\n  "fp16" {}\n}'))
    assert "config.json:3:10" in message


def test_a_key_given_twice_is_refused_at_any_level(tmp_path: Path) -> None:
    for text in (
        '{"gradient_clipping": 1, "gradient_clipping": 2}',
        '{"bf16": {"enabled": true, "enabled": false}}',
    ):
        message = refusal(write(tmp_path, text))
        assert ("gradient_clipping" if "clipping" in text else "enabled") in message


def test_bytes_that_are_no_utf_8_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b'{"bf16": \xff}')
    assert "config.json" in refusal(file)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"bf16"', ""])
def test_a_file_without_an_object_is_refused(tmp_path: Path, text: str) -> None:
    assert "config.json" in refusal(write(tmp_path, text))


@pytest.mark.parametrize("text", ['{"gradient_clipping": NaN}', '{"gradient_clipping": Infinity}'])
def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path, text: str) -> None:
    assert refusal(write(tmp_path, text))


def test_an_endless_nesting_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, '{"bf16":' * 100_000))


@pytest.mark.parametrize("config", [None, 3, [], b"config.json", {"bf16"}])
def test_what_is_neither_dict_nor_path_is_refused(config: Any) -> None:
    assert refusal(config)


def test_a_key_that_is_no_string_is_refused() -> None:
    assert "3" in refusal({3: True})
