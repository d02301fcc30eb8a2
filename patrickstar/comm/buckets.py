"""Which neighbouring buffers travel together: arithmetic on sizes.

A collective costs a fixed latency besides its bytes, so many small buffers are cheaper as one
packed message. Packing costs a copy and a scratch buffer, so big ones travel alone, and a bucket
never grows past a limit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def plan_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable], limit: int
) -> list[tuple[int, ...]]:
    """Cut a list of buffers into buckets of consecutive buffers.

    Only neighbours are packed, so the order of the list stays the order on the wire.

    Args:
        sizes: bytes of each buffer.
        kinds: what must be equal inside a bucket, for example the dtype, one per buffer.
        limit: bytes that a bucket of more than one buffer may hold; 0 packs nothing.

    Returns:
        The indices in each bucket; together they are `0..len(sizes) - 1` in order.
    """
    buckets: list[list[int]] = []
    filled = 0
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        joins = bool(buckets) and kinds[buckets[-1][0]] == kind and filled + size <= limit
        if joins:
            buckets[-1].append(index)
            filled += size
        else:
            buckets.append([index])
            filled = size
    return [tuple(bucket) for bucket in buckets]
