"""Our own section: budgets, chunks, policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patrickstar.config import load_config
from patrickstar.errors import ConfigError


def ours(**keys: Any) -> Any:
    return load_config({"patrickstar": keys}).patrickstar


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        ours(**keys)
    return str(raised.value)


def test_without_the_section_there_is_no_budget() -> None:
    memory = load_config({}).patrickstar.memory
    assert (memory.device, memory.host, memory.disk) == (None, None, None)


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(
    "size, bytes_",
    [
        ("1.5GiB", 3 * 2**29),
        ("500MB", 500 * 10**6),
        (4096, 4096),
        (1e9, 10**9),
        ("auto", None),
        ("AUTO", None),
        (None, None),
    ],
)
def test_a_budget_is_bytes_a_size_or_auto(tier: str, size: Any, bytes_: int | None) -> None:
    assert getattr(ours(memory={tier: size}).memory, tier) == bytes_


@pytest.mark.parametrize("size", ["1.5 parsecs", "lots", -1, True, [1], {}])
def test_a_budget_that_is_no_size_names_the_key_and_the_value(size: Any) -> None:
    message = refusal(memory={"host": size})
    assert "patrickstar.memory.host" in message
    assert str(size) in message


@pytest.mark.parametrize(
    "disk, path, size",
    [
        ("/scratch", "/scratch", None),
        ("/scratch:3GiB", "/scratch", 3 * 2**30),
        ("/scratch:3GiB:1KiB", "/scratch:3GiB", 1024),
        ("/a:b/c", "/a:b/c", None),
        ({"path": "/scratch"}, "/scratch", None),
        ({"path": "/scratch:3GiB"}, "/scratch:3GiB", None),
        ({"path": "/scratch", "size": "auto"}, "/scratch", None),
        ({"path": Path("/scratch"), "size": 4096}, "/scratch", 4096),
        ("/scratch:auto", "/scratch", None),
    ],
)
def test_a_disk_is_an_object_or_one_string(disk: Any, path: str, size: int | None) -> None:
    tier = ours(memory={"disk": disk}).memory.disk
    assert (tier.path, tier.size) == (Path(path), size)


def test_no_disk_is_null() -> None:
    assert ours(memory={"disk": None}).memory.disk is None


@pytest.mark.parametrize("disk", ["", {}, {"size": "1GiB"}, {"path": ""}, {"path": 3}, 3, [], True])
def test_a_disk_needs_a_path(disk: Any) -> None:
    assert "patrickstar.memory.disk" in refusal(memory={"disk": disk})


def test_chunk_size_is_auto_or_elements() -> None:
    assert ours().chunk_size == "auto"
    assert ours(chunk_size="auto").chunk_size == "auto"
    assert ours(chunk_size=2**20).chunk_size == 2**20
    assert ours(chunk_size=1e6).chunk_size == 1_000_000


@pytest.mark.parametrize("value", [0, -1, 1.5, "big", None, True])
def test_a_bad_chunk_size_is_told_once_with_both_choices(value: Any) -> None:
    message = refusal(chunk_size=value)
    assert "patrickstar.chunk_size" in message
    assert "auto" in message
    assert "number of elements" in message


def test_parameters_over_2_to_the_26_elements_are_used_in_pieces() -> None:
    assert ours().piece_size == 2**26
    assert ours(piece_size=1000).piece_size == 1000


def test_policy_prefetch_and_exactness() -> None:
    defaults = ours()
    assert (defaults.policy, defaults.prefetch, defaults.deepspeed_exact) == (
        "planned",
        True,
        False,
    )
    chosen = ours(policy="lru", prefetch=False, deepspeed_exact=True)
    assert (chosen.policy, chosen.prefetch, chosen.deepspeed_exact) == ("lru", False, True)
    assert ours(policy="my.package:Policy").policy == "my.package:Policy"


@pytest.mark.parametrize(
    "value", ["lrv", "", "my.package", ":Policy", "my package:Policy", 3, None]
)
def test_an_unknown_policy_names_the_known_ones(value: Any) -> None:
    message = refusal(policy=value)
    assert "patrickstar.policy" in message
    assert "planned" in message
    assert "package.module:Class" in message
