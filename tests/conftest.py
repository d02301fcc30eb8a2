"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A pool of processes that serve as ranks."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()
