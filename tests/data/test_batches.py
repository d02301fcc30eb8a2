"""Batches can be drawn again."""

from __future__ import annotations

import pytest
import torch

from patrickstar.data import Batches
from patrickstar.errors import DataError

TOKENS = torch.arange(200, dtype=torch.uint8)


def batches(tokens: torch.Tensor = TOKENS, length: int = 7, seed: int = 0) -> Batches:
    return Batches(tokens, batch_size=3, sequence_length=length, seed=seed)


def test_targets_are_the_tokens_one_further_on() -> None:
    tokens, targets = batches()[0]
    assert tokens.shape == targets.shape == (3, 7)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)


def test_a_batch_depends_on_its_number_and_the_seed_alone() -> None:
    once, again = batches(), batches()
    later = once[5][0]
    assert torch.equal(later, again[5][0])
    assert not torch.equal(later, once[6][0])
    assert not torch.equal(later, batches(seed=1)[5][0])


def test_every_place_of_the_corpus_is_drawn_up_to_its_last_byte() -> None:
    starts = torch.cat([batches(TOKENS[:10])[index][0][:, 0] for index in range(50)])
    assert set(starts.tolist()) == {0, 1, 2}


def test_the_smallest_corpus_is_one_sequence_and_a_target() -> None:
    assert torch.equal(batches(TOKENS[:8])[0][0][0], torch.arange(7))
    with pytest.raises(DataError, match=r"7 bytes, too few .* 7 tokens .* at least 8 bytes"):
        batches(TOKENS[:7])
