"""Whatever is thrown at it, a config loads or is refused with one paragraph."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from patrickstar.config import Config, load_config
from patrickstar.config.key import Status
from patrickstar.config.keys import TABLE
from patrickstar.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "fp32", "bf16", "cpu", "nvme", "AdamW", "WarmupLR", "1GiB", 0, 1, 2])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
PATHS = st.sampled_from(sorted(TABLE))


@st.composite
def configs(draw: st.DrawFn) -> dict[Any, Any]:
    """Dicts with values of any type under real keys, and a few keys that are not."""
    config: dict[Any, Any] = {}
    for path, value in draw(st.lists(st.tuples(PATHS, VALUES), max_size=5)):
        here = config
        *parents, last = path.split(".")
        for name in parents:
            here = here.setdefault(name, {})
            if not isinstance(here, dict):
                break
        else:
            here[last] = value
    if draw(st.integers(0, 3)) == 0:
        config.update(
            draw(st.dictionaries(st.text(max_size=8) | st.integers(), VALUES, max_size=2))
        )
    return config


def loaded(config: Any, world_size: int = 1) -> Config | None:
    """The config, or None where it is refused as it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load_config(config, world_size=world_size)
        except ConfigError as error:
            told = str(error)
    assert told.strip()
    assert "pydantic" not in told
    return None


@settings(max_examples=500, deadline=None)
@given(config=configs(), world_size=st.integers(1, 8))
@example(config={"patrickstar": {"memory": {"disk": "\0"}}}, world_size=1)
@example(config={"optimizer": {"type": "Adam", "params": {"": [[[]]]}}}, world_size=1)
@example(config={"train_batch_size": 10**400}, world_size=1)
def test_only_a_config_error_escapes(config: dict[Any, Any], world_size: int) -> None:
    before = copy.deepcopy(config)
    result = loaded(config, world_size)
    assert repr(config) == repr(before)
    if result is not None:
        batches = result.train_micro_batch_size_per_gpu * result.gradient_accumulation_steps
        assert result.train_batch_size == batches * world_size
        assert result.precision in ("fp32", "bf16", "fp16")
        assert hash(result) is not None


@settings(max_examples=200, deadline=None)
@given(config=st.text(max_size=12) | VALUES | st.binary(max_size=4))
def test_anything_but_a_dict_or_path_is_refused(config: Any) -> None:
    assume(not isinstance(config, dict))
    assert loaded(config) is None


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=60) | configs().map(lambda c: json.dumps(c).encode()))
def test_a_file_of_anything_is_refused_or_loads(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    loaded(file)


CHECKED = sorted(
    path
    for path, key in TABLE.items()
    if key.status is not Status.REJECTED and ((key.section and not key.free) or key.kind is not Any)
)


@pytest.mark.parametrize("path", CHECKED)
def test_a_value_of_no_sensible_type_is_told_with_its_path(path: str) -> None:
    value: Any = object()
    for name in reversed(path.split(".")):
        value = {name: value}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as raised:
            load_config(value)
    above = [path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)]
    refused = [one for one in above if TABLE[one].status is Status.REJECTED]
    assert any(one in str(raised.value) for one in (path, *refused))
