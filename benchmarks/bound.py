"""A lower bound on the bytes that any schedule must move for a trace: a linear program.

Between two uses of a chunk on the fast tier lies an interval, in which some part x of it may be
away. Whoever lets it leave pays its bytes for coming back, unless the next use overwrites it, and
once for writing it down after every time it was changed. At every moment the chunks in use, memory
that no chunk owns and what is not away must fit. Real schedules let whole chunks leave, so allowing
parts can only cost less. Reading ahead only takes room. A schedule that never repeats is covered
too: the mean of its iterations satisfies the same (linear) constraints. Hence the optimum of this
program is at most the bytes per iteration of any schedule.

Contents that die (`blanked`) or are overwritten next need neither room nor traffic here, which can
again only make the bound lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from patrickstar.memory import Trace


@dataclass(frozen=True)
class _Interval:
    """Moments after `start` and before `end` (which may lie in the next iteration)."""

    chunk: int
    start: int
    end: int
    group: int  # of intervals that one write pays for; -1 if the contents are clean


def lower_bound(trace: Trace, sizes: Mapping[int, int], capacity: int, tier: int = 0) -> float:
    """Bytes per iteration that must move between `tier` and the one below it.

    Raises:
        ValueError: no schedule fits into `capacity`.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    length = len(trace.moments)
    intervals = _intervals(trace, tier)
    groups = sorted({i.group for i in intervals if i.group >= 0})
    column_of = {group: len(intervals) + n for n, group in enumerate(groups)}
    cost = np.zeros(len(intervals) + len(groups))
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    held = np.array([float(moment.other.get(tier, 0)) for moment in trace.moments])
    for moment, now in enumerate(trace.moments):
        held[moment] += sum(sizes[c] for c in {u.chunk for u in now.uses if u.tier == tier})
    for column, interval in enumerate(intervals):
        size = sizes[interval.chunk]
        cost[column] = size
        for moment in range(interval.start + 1, interval.end):
            held[moment % length] += size
            rows.append(moment % length)
            columns.append(column)
            values.append(-float(size))
    limit = list(capacity - held)
    if not intervals:  # nothing can be away, and nothing need be
        if min(limit, default=0.0) < 0:
            raise ValueError(f"no schedule fits into {capacity} bytes")
        return 0.0
    row = length
    for column, interval in enumerate(intervals):
        if interval.group >= 0:
            rows += [row, row]
            columns += [column, column_of[interval.group]]
            values += [1.0, -1.0]
            limit.append(0.0)
            cost[column_of[interval.group]] = sizes[interval.chunk]
            row += 1
    matrix = coo_array((values, (rows, columns)), shape=(row, len(cost)))
    solved = linprog(cost, A_ub=matrix.tocsr(), b_ub=limit, bounds=(0, 1), method="highs")
    if solved.status != 0:
        raise ValueError(f"no schedule fits into {capacity} bytes: {solved.message}")
    return float(solved.fun)


def _intervals(trace: Trace, tier: int) -> list[_Interval]:
    """The intervals between uses in which contents must be kept somewhere."""
    length = len(trace.moments)
    uses: dict[int, list[tuple[int, bool, bool]]] = {}
    dies: dict[int, list[int]] = {}
    for index, moment in enumerate(trace.moments):
        for use in moment.uses:
            if use.tier == tier:
                entry = (index, use.access.reads, use.access.writes)
                uses.setdefault(use.chunk, []).append(entry)
        for chunk in moment.blanked:
            dies.setdefault(chunk, []).append(index)
    found: list[_Interval] = []
    group = -1
    for chunk, points in uses.items():
        # Begin at a write, so that the intervals that one write pays for follow each other.
        first = next((n for n, point in enumerate(points) if point[2]), 0)
        turned = points[first:] + [(i + length, r, w) for i, r, w in points[:first]]
        dirty = any(point[2] for point in points)
        for n, (start, _, writes) in enumerate(turned):
            if writes:
                group += 1
            last = n + 1 == len(turned)
            end, reads = (
                (turned[0][0] + length, turned[0][1])
                if last
                else (turned[n + 1][0], turned[n + 1][1])
            )
            dead = any(start <= d < end or start <= d + length < end for d in dies.get(chunk, []))
            if end - start > 1 and reads and not dead:
                found.append(_Interval(chunk, start, end, group if dirty else -1))
    return found
