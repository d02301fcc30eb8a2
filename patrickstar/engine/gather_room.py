"""How much may stay gathered: what that saves in communication, and what room there is for it.

In theory every chunk is gathered once in each forward and once in each backward that uses it. That
takes room: a head that is tied to the embedding is used at both ends of a forward, a recomputed
block once more right before its backward, and small chunks (of norms, say) all the time. With the
order known, the fewest bytes travel if what is used furthest in the future is given up (Belady, IBM
Systems Journal 5(2), 1966). So the least room that reaches the theory can be found by trying. What
room there is shows in the trace of a first iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from patrickstar.engine.use_order import Order
from patrickstar.memory.ledger import TierAccount
from patrickstar.memory.trace import Trace

_MOST_TRIED = 64
_UNLIMITED = 1 << 50


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


def room_left(
    tiers: Sequence[TierAccount], sizes: Mapping[int, int], kept: int, trace: Trace
) -> int:
    """Half of the bytes that the first iteration left free, what it had set aside aside.

    Args:
        tiers: the books of every tier, fastest first.
        sizes: bytes of every chunk, and of every shard.
        kept: bytes of the shards and of what is whole, which have to be somewhere.
    """
    first, *lower = tiers
    if first.capacity is None:
        return _UNLIMITED
    if not lower:
        return max(first.capacity - first.peak, 0) // 2
    need = 0
    for moment in trace.moments:
        there = {use.chunk for use in moment.uses if use.tier == 0} | {*moment.held.get(0, ())}
        need = max(need, moment.other.get(0, 0) + sum(sizes.get(chunk, 0) for chunk in there))
    left = first.capacity - need
    capacities = [account.capacity for account in (first, *lower)]
    if None not in capacities:
        left = min(left, sum(c or 0 for c in capacities) - kept - need)
    return max(left, 0) // 2
