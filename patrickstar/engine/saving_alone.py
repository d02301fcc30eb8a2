"""What ranks have for themselves, in a checkpoint that the first one writes.

They tell each other what there is; then each sends what it has, a segment at a time, so nobody
needs memory for more than a segment of somebody else's. All ranks walk over the same segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from patrickstar.checkpoint.tensor_file import TensorSource
from patrickstar.engine.ranks import Ranks
from patrickstar.engine.together import Part, Walk

_SEGMENT = 1 << 22  # elements


@dataclass(frozen=True)
class Offer:
    """A tensor that only this rank has.

    Attributes:
        lengths: elements of each part.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    lengths: tuple[int, ...]
    parts: tuple[Part, ...]


def sources_of_others(ranks: Ranks, walk: Walk, offers: Sequence[Offer]) -> list[TensorSource]:
    """What the others have, as the next of `walk`; called on all ranks.

    Args:
        offers: what this rank has. The first one writes its own without telling.
    """
    mine = [] if ranks.is_first else offers
    described = ranks.comm.control.exchange_json(
        "what ranks have alone", [_described(offer) for offer in mine]
    )
    found = []
    for rank, there in zip(ranks.comm.topology.ranks, described, strict=True):
        for number, (key, dtype, shape, lengths) in enumerate(there):
            offer = mine[number] if rank == ranks.comm.rank else None
            parts = [
                functools.partial(_sent, ranks, rank, key, getattr(torch, dtype), offer, part, span)
                for part, length in enumerate(lengths)
                for span in _spans(length)
            ]
            found.append(walk.source(key, getattr(torch, dtype), tuple(shape), parts))
    return found


def _described(offer: Offer) -> list[Any]:
    dtype = str(offer.dtype).removeprefix("torch.")
    return [offer.key, dtype, list(offer.shape), list(offer.lengths)]


def _spans(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, _SEGMENT):
        yield start, min(start + _SEGMENT, length)


@contextmanager
def _sent(
    ranks: Ranks,
    rank: int,
    key: str,
    dtype: torch.dtype,
    offer: Offer | None,
    part: int,
    span: tuple[int, int],
) -> Iterator[torch.Tensor]:
    """Elements of a part of what `rank` has, on all ranks.

    Args:
        offer: on that rank, what it has.
    """
    segment = torch.empty(span[1] - span[0], dtype=dtype, device=ranks.comm.device)
    if offer is not None:
        with offer.parts[part]() as values, torch.no_grad():
            segment.copy_(values.detach().reshape(-1)[span[0] : span[1]])
    ranks.from_rank(key, segment.view(torch.uint8), rank)
    yield segment
