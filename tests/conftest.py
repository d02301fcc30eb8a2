"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .rank_pool import RankPool
from .switches import switches


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    """Sums depend on the number of threads, so a test that leaves another changes others' bits."""
    before = torch.get_num_threads()
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(before)
    assert left == before, f"this test leaves {left} threads where there were {before}"


@pytest.fixture(autouse=True)
def _as_many_switches_on_as_before() -> Iterator[None]:
    """What a test leaves switched on fails others, which come after it on the same process."""
    before = switches()
    yield
    assert switches() == before


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A pool of processes that serve as ranks."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
