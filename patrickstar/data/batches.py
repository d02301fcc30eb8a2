"""Batches that depend on nothing but a seed and their number.

Batch `n` of seed `s` is the same in every run, whatever was drawn before, so a run that resumes at
step `n` sees what it would have seen, and two runs can be compared step by step.
"""

from __future__ import annotations

import numpy
import torch

from patrickstar.errors import DataError


class Batches:
    """Sequences drawn at random places of a corpus.

    Args:
        tokens: uint8 [bytes].
        batch_size: sequences in a batch.
        sequence_length: tokens in a sequence.
        seed: not negative.

    Raises:
        DataError: the corpus is too small for one sequence and its targets.
    """

    def __init__(
        self, tokens: torch.Tensor, *, batch_size: int, sequence_length: int, seed: int
    ) -> None:
        if tokens.numel() <= sequence_length:
            raise DataError(
                f"the data has {tokens.numel()} bytes, too few for one sequence of "
                f"{sequence_length} tokens and its last target; give at least "
                f"{sequence_length + 1} bytes, or a smaller --sequence-length"
            )
        self._tokens = tokens
        self._batch_size, self._length, self._seed = batch_size, sequence_length, seed

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Batch number `index`: tokens and targets, int64 [batch_size, sequence_length]."""
        places = numpy.random.default_rng([self._seed, index]).integers(
            self._tokens.numel() - self._length, size=self._batch_size
        )
        sequences = torch.stack(
            [self._tokens[place : place + self._length + 1] for place in places.tolist()]
        ).long()
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
