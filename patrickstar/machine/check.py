"""One thing that was looked at, and what it means for training."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    """What a check found.

    FINE: nothing to do. MISSING: something optional is not there. SLOW: training works, slower than
    it could. FAILS: training, or what was asked for, will not work.
    """

    FINE = "fine"
    MISSING = "missing"
    SLOW = "slow"
    FAILS = "fails"


@dataclass(frozen=True)
class Check:
    """What was found about `name`.

    Attributes:
        found: facts, in a phrase.
        why: what comes of them; empty where all is fine.
        advice: what to do about it.
    """

    name: str
    state: State
    found: str
    why: str = ""
    advice: str = ""


def worst(checks: list[Check]) -> State:
    """The worst state among `checks`."""
    order = list(State)
    return max((check.state for check in checks), key=order.index, default=State.FINE)
