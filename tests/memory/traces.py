"""Traces to plan for, and an independent replay of plans."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from patrickstar.memory import Access, Moment, Plan, Trace, Use

READ, UPDATE, OVERWRITE = Access.READ, Access.UPDATE, Access.OVERWRITE


def gpt_trace(
    layers: int, *, unit: int = 1000, accumulation: int = 1, update_tier: int = 0
) -> tuple[Trace, dict[int, int]]:
    """Forward, backward with gradients born, and a step that consumes them, as the engine has it.

    A layer has a parameter and a gradient chunk of two units and master weights and two moments of
    four. Activations grow by half a unit a layer and shrink again.
    """
    chunks: dict[tuple[str, int], int] = {}
    sizes: dict[int, int] = {}
    for kind in "pgmab":
        for layer in range(layers):
            chunks[kind, layer] = len(sizes)
            sizes[len(sizes)] = (2 if kind in "pg" else 4) * unit
    moments: list[Moment] = []
    for turn in range(accumulation):
        for layer in range(layers):
            used = (Use(chunks["p", layer], READ),)
            moments.append(Moment(used, {0: layer * unit // 2}))
        for layer in reversed(range(layers)):
            used = (Use(chunks["p", layer], READ),)
            moments.append(Moment(used, {0: layer * unit // 2}))
            used = (Use(chunks["g", layer], UPDATE if turn else OVERWRITE),)
            moments.append(Moment(used, {0: layer * unit // 2}))
    for layer in range(layers):
        uses = [Use(chunks["g", layer], READ, update_tier)]
        uses.append(Use(chunks["p", layer], OVERWRITE, update_tier))
        uses += [Use(chunks[kind, layer], UPDATE, update_tier) for kind in "mab"]
        moments.append(Moment(tuple(uses), {}, (chunks["g", layer],)))
    return Trace(moments, [(0, "all")]), sizes


def random_trace(seed: int, *, tiers: int = 1) -> tuple[Trace, dict[int, int]]:
    """A few chunks used, replaced and given up at random; uses on `tiers` tiers."""
    rng = random.Random(seed)
    sizes = {chunk: rng.choice([1, 1, 2, 4]) * 1000 for chunk in range(rng.randint(3, 8))}
    moments = []
    for _ in range(rng.randint(4, 24)):
        chunks = rng.sample(sorted(sizes), rng.choice([1, 1, 2]))
        uses = tuple(Use(c, rng.choice(list(Access)), rng.randrange(tiers)) for c in chunks)
        other = {tier: rng.choice([0, 0, 1000]) for tier in range(tiers)}
        moments.append(Moment(uses, other, tuple(c for c in chunks if rng.random() < 0.1)))
    return Trace(moments), sizes


class Replay:
    """Does what a plan says, instantly, and finds out whether that is possible and enough.

    Chunks begin on the lowest tier. In the first round what is missing comes by itself; from the
    second round on every chunk must be there when it is used.
    """

    def __init__(
        self, plan: Plan, sizes: Mapping[int, int], capacities: Sequence[int | None]
    ) -> None:
        self.plan, self.sizes, self.capacities = plan, sizes, capacities
        self.tiers = len(capacities)
        self.valid: dict[int, set[int]] = {chunk: {self.tiers - 1} for chunk in sizes}
        first: dict[int, Access] = {}
        for moment in plan.trace.moments:
            for use in moment.uses:
                first.setdefault(use.chunk, use.access)
        for chunk, access in first.items():
            if access is OVERWRITE:
                self.valid[chunk] = set()
        self.moved: dict[tuple[str, int], int] = {}
        self.peak = [0] * self.tiers
        self.round = 0

    def run(self, rounds: int = 3) -> None:
        for self.round in range(rounds):
            self.moved = {}
            for moment, actions in zip(self.plan.trace.moments, self.plan.actions, strict=True):
                for action in actions:
                    self._act(action.kind, action.chunk, action.tier)
                for use in moment.uses:
                    self._use(use)
                for tier in range(self.tiers - 1):
                    self._weigh(tier, moment)
                for chunk in moment.blanked:
                    self.valid[chunk] = set()

    def _act(self, kind: str, chunk: int, tier: int) -> None:
        valid = self.valid[chunk]
        settled = self.round > 0
        if kind == "save":
            assert tier in valid or not settled, f"{chunk} is not on tier {tier} to be saved"
            if tier in valid:
                assert tier + 1 not in valid or not settled, f"{chunk} is saved for nothing"
                self._move("save", chunk, tier)
                valid.add(tier + 1)
        elif kind == "evict":
            if tier in valid:
                assert any(t > tier for t in valid) or not settled, f"{chunk} would be lost"
                if not any(t > tier for t in valid):
                    valid.add(tier + 1)
                valid.remove(tier)
        else:
            assert tier not in valid or not settled, f"{chunk} is on tier {tier} already"
            self._bring(chunk, tier)

    def _bring(self, chunk: int, tier: int) -> None:
        valid = self.valid[chunk]
        if valid and tier not in valid:
            if tier + 1 not in valid:
                assert self.round == 0, f"{chunk} is not on tier {tier + 1} to be loaded from"
                valid.add(tier + 1)
            self._move("load", chunk, tier)
            valid.add(tier)

    def _move(self, kind: str, chunk: int, tier: int) -> None:
        self.moved[kind, tier] = self.moved.get((kind, tier), 0) + self.sizes[chunk]

    def _use(self, use: Use) -> None:
        valid = self.valid[use.chunk]
        if use.access.reads and valid and use.tier not in valid:
            assert self.round == 0, f"{use} is not there"
            valid.add(use.tier)
        if use.access.writes or not valid:
            self.valid[use.chunk] = {use.tier}

    def _weigh(self, tier: int, moment: Moment) -> None:
        chunks = sum(self.sizes[c] for c, valid in self.valid.items() if tier in valid)
        taken = chunks + moment.other.get(tier, 0)
        self.peak[tier] = max(self.peak[tier], taken)
        capacity = self.capacities[tier]
        if self.round > 0:
            assert capacity is None or taken <= capacity, f"tier {tier} holds {taken}"
