"""How much may stay gathered: what it costs in communication, computed from an order of uses.

In theory every chunk is gathered once in each forward and once in each backward that uses it. That
takes room: a head that is tied to the embedding is used at both ends of a forward, a recomputed
block once more right before its backward, and small chunks (of norms, say) all the time. With the
order known, the fewest bytes travel if what is used furthest in the future is given up (Belady, IBM
Systems Journal 5(2), 1966). So the least room that reaches the theory can be found by trying.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from patrickstar.engine.use_order import Order

_MOST_TRIED = 64


def gathered_bytes(order: Order, sizes: Mapping[int, int], room: int) -> int:
    """Bytes that one iteration gathers if at most `room` bytes stay, or what is used together.

    Args:
        sizes: bytes of every chunk.
    """
    there: set[int] = set()
    total = 0
    for place, group in enumerate(order.groups):
        for chunk in group:
            if chunk in there:
                continue
            held = sum(sizes[other] for other in there)
            free = sorted(
                (other for other in there if other not in group),
                key=lambda other: order.next_use(other, place),
            )
            while free and held + sizes[chunk] > room:
                victim = free.pop()
                there.remove(victim)
                held -= sizes[victim]
            there.add(chunk)
            total += sizes[chunk]
    return total


def once_a_pass(order: Order, sizes: Mapping[int, int]) -> int:
    """Bytes that are gathered if every forward and backward gathers what it uses once."""
    bounds = [0, *order.passes, len(order.groups)]
    total = 0
    for start, stop in pairwise(bounds):
        used = {chunk for group in order.groups[start:stop] for chunk in group}
        total += sum(sizes[chunk] for chunk in used)
    return total


def least_room(order: Order, sizes: Mapping[int, int]) -> int:
    """The least room, in steps of the largest chunk, in which each pass gathers a chunk once."""
    used = [sizes[chunk] for chunk in order.chunks]
    largest, everything = max(used, default=0), sum(used)
    theory = once_a_pass(order, sizes)
    for count in range(2, _MOST_TRIED):
        room = count * largest
        if room >= everything or gathered_bytes(order, sizes, room) <= theory:
            return min(room, everything)
    return everything
