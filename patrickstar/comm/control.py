"""Small messages between ranks on the caller's thread, beside the lane.

Agreements (is the order the same, who was absent) and scalars (norms, overflow flags) are a few
bytes on the CPU. They must not queue behind chunks in flight, and on a GPU they must not wait for a
stream, so they go over a gloo group with tags of their own.

Every rank sends to every other: for a few bytes that is one latency instead of `log N`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import torch

from patrickstar.comm.call import Place, Turn
from patrickstar.comm.lane import Explain
from patrickstar.comm.messages import Messages, finish
from patrickstar.comm.progress import Progress


class Control:
    """Exchanges small CPU tensors within a list of ranks.

    Args:
        messages: connections that contain `ranks`.
        ranks: global ranks, the same list on all of them.
        rank: this global rank.
        place: the control sequence of the communicator.
        timeout: seconds one exchange may take.
        progress: told which exchange runs.
        explain: turns a failure into the error users see.
    """

    def __init__(
        self,
        messages: Messages,
        ranks: Sequence[int],
        rank: int,
        place: Place,
        timeout: float,
        progress: Progress,
        explain: Explain,
    ) -> None:
        self._messages = messages
        self._ranks = tuple(ranks)
        self._index = self._ranks.index(rank)
        self._place = place
        self._timeout = timeout
        self._progress = progress
        self._explain = explain
        self._lock = threading.Lock()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part, in the order of results."""
        return self._ranks

    def exchange(self, purpose: str, mine: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor.

        Args:
            purpose: what it is about, the same on every rank, for errors.
            mine: 1-D CPU tensor, the same length and dtype on every rank.

        Returns:
            Shape `[len(ranks), len(mine)]`, row i from `ranks[i]`.

        Raises:
            CommError: a rank did not take part in time, or runs another exchange.
        """
        with self._lock:
            call = self._place.next(purpose, "", mine.numel(), _name(mine.dtype))
            gathered = torch.empty(len(self._ranks), mine.numel(), dtype=mine.dtype)
            gathered[self._index].copy_(mine)
            self._progress.start(call)
            try:
                self._swap(Turn.start(call, self._timeout), gathered)
            except Exception as raised:
                raise self._explain(call, raised) from raised
            self._progress.finish(call)
            return gathered

    def exchange_bytes(self, purpose: str, mine: bytes) -> list[bytes]:
        """Return every rank's bytes, which may differ in length, in the order of `ranks`.

        Raises:
            CommError: as `exchange`.
        """
        lengths = self.exchange(f"{purpose}: length", torch.tensor([len(mine)]))[:, 0].tolist()
        padded = torch.zeros(max(max(lengths), 1), dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self.exchange(purpose, padded)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def exchange_json(self, purpose: str, mine: Any) -> list[Any]:
        """Return what every rank gives, anything that JSON knows, in the order of `ranks`.

        Raises:
            CommError: as `exchange`.
        """
        texts = self.exchange_bytes(purpose, json.dumps(mine).encode())
        return [json.loads(text) for text in texts]

    def _swap(self, turn: Turn, gathered: torch.Tensor) -> None:
        peers = [index for index in range(len(self._ranks)) if index != self._index]
        if gathered.shape[1] == 0:
            return
        posted = [self._messages.receive(gathered[i], self._ranks[i], turn.tag) for i in peers]
        mine = gathered[self._index]
        posted += [self._messages.send(mine, self._ranks[i], turn.tag) for i in peers]
        finish(turn, posted)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
