"""Training that is interrupted goes on with the right bits, or says clearly why it cannot."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import ChunkStateError
from patrickstar.optim import AdamW
from tests.engine.training import run_plain, settings
from tests.interrupts import interrupted_at
from tests.switches import switches

WIDTH, CHUNK, BUDGET = 32, 2048, 1 << 17


class Squares(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        parts = [part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"x": torch.randn(4, WIDTH, generator=draw)} for _ in range(count)]


class Run:
    """A run that is interrupted again and again, beside the losses of one that is not."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        *,
        plan: bool,
        accumulation: int = 1,
        budget: int = BUDGET,
    ) -> None:
        self.folder, self.accumulation = folder, accumulation
        self.batches = batches(steps * accumulation)
        plain = run_plain(Squares, self.batches, clipping=0.5, accumulation=accumulation)
        self.expected = plain.losses
        torch.manual_seed(0)
        how = settings(
            host=budget,
            disk=folder,
            chunk=CHUNK,
            clipping=0.5,
            plan=plan,
            accumulation=accumulation,
        )
        engine, optimizer = make_engine(Squares, how)
        self.engine: Engine = engine
        self.optimizer: ChunkedOptimizer = optimizer
        self.refused = self.redone = 0

    def step(self) -> list[float]:
        """The next step, all micro-batches of it."""
        first = self.engine.global_steps * self.accumulation
        losses = []
        for batch in self.batches[first : first + self.accumulation]:
            loss = self.engine(**batch)
            self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def right_step(self) -> None:
        first = self.engine.global_steps * self.accumulation
        assert self.step() == self.expected[first : first + self.accumulation]

    def lines(self) -> int:
        with interrupted_at(None) as lines:
            self.right_step()
        return lines.seen

    def interrupt(self, line: int) -> None:
        """Interrupt a step, go on as a user would, and check the next one."""
        saved = self.engine.global_steps
        self.engine.save_checkpoint(self.folder / "saved", tag="before", keep=1)
        with interrupted_at(line) as lines, suppress(KeyboardInterrupt):
            self.step()
        try:
            self.go_on(saved)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {lines.where} (line {line})") from error

    def go_on(self, saved: int) -> None:
        self.optimizer.zero_grad()
        if self.engine.micro_steps % self.accumulation:  # interrupted between micro-batches
            self.engine.load_checkpoint(self.folder / "saved")
        try:
            if self.engine.global_steps == saved:
                self.right_step()
                self.redone += 1
        except ChunkStateError:
            with pytest.raises(ChunkStateError, match="ended early"):
                self.engine.save_checkpoint(self.folder / "torn")
            self.engine.load_checkpoint(self.folder / "saved")
            self.refused += 1
        self.right_step()
        assert not any(any(self._entry(c).pins) for c in self.engine.memory.ledger.chunks())

    def _entry(self, chunk: int):  # type: ignore[no-untyped-def]
        return self.engine.memory.ledger.entry(chunk)


def places(total: int, count: int) -> Iterator[int]:
    return iter(range(0, total, max(1, total // count)))


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_step_costs_no_bit(
    tmp_path: Path, plan: bool, accumulation: int
) -> None:
    count = 30 if plan else 8  # without plans every operator is watched, which is slow to trace
    run = Run(tmp_path, 3 * count, plan=plan, accumulation=accumulation)
    for _ in range(2):
        run.right_step()
    for line in places(run.lines(), count):
        run.interrupt(line)
    assert run.redone and run.refused
    run.engine.close()


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_pass_leaves_nothing_of_pytorch_switched_on(
    tmp_path: Path, plan: bool
) -> None:
    torch.manual_seed(0)
    engine, _ = make_engine(Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK, plan=plan))
    (batch,) = batches(1)
    among = "engine/engine.py"
    with interrupted_at(None, among) as lines:
        engine.backward(engine(**batch))
    before = switches()
    for line in range(lines.seen):
        with interrupted_at(line, among) as lines, suppress(KeyboardInterrupt):
            engine.backward(engine(**batch))
        assert switches() == before, f"after an interrupt at {lines.where}"
    engine.close()


class Interrupting:
    """AdamW, after whose next update so many interrupts arrive."""

    def __init__(self) -> None:
        self._rule, self.interrupts = AdamW(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def apply(self, *args: Any, **kwargs: Any) -> None:
        self._rule.apply(*args, **kwargs)
        count, self.interrupts = self.interrupts, 0
        for _ in range(count):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
def test_an_interrupt_waits_for_the_end_of_the_step_and_the_second_does_not(
    tmp_path: Path,
) -> None:
    expected = run_plain(Squares, batches(4))
    rule = Interrupting()
    torch.manual_seed(0)
    how = settings(host=BUDGET, disk=tmp_path, chunk=CHUNK, rule=rule)  # type: ignore[arg-type]
    engine, optimizer = make_engine(Squares, dataclasses.replace(how, overlap_update=False))
    losses = []
    for number, batch in enumerate(batches(4)):
        loss = engine(**batch)
        losses.append(loss.item())
        engine.backward(loss)
        if number == 2:
            engine.save_checkpoint(tmp_path / "saved")  # with the gradients of this batch
        rule.interrupts = (0, 1, 2, 0)[number]
        if not rule.interrupts:
            optimizer.step()
            continue
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if number == 1:
            assert engine.global_steps == 2
        else:
            with pytest.raises(ChunkStateError, match="load_checkpoint"):
                engine(**batch)
            engine.load_checkpoint(tmp_path / "saved")
            optimizer.step()
    assert losses == expected.losses
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.weights.items())
    engine.close()


def test_gradients_of_a_backward_that_failed_are_not_trained_on(tmp_path: Path) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room for a gradient")

    engine, optimizer = make_engine(
        Squares, settings(host=BUDGET, disk=tmp_path, chunk=CHUNK, accumulation=2)
    )
    (batch,) = batches(1)
    engine.backward(engine(**batch))
    optimizer.step()
    bad = engine.layers[2:](Failing.apply(engine.layers[:2](batch["x"]))).square().mean()
    with pytest.raises(MemoryError):
        engine.backward(bad)
    engine.backward(engine(**batch))  # as if nothing had been
    with pytest.raises(ChunkStateError, match="zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    assert engine.micro_steps == 0 or engine.micro_steps % 2 == 0
    assert all(p.grad is None for p in engine.parameters())
    engine.close()


@pytest.mark.parametrize("plan", [True, False])
def test_parameters_see_their_uses_where_somebody_has_switched_that_off(
    tmp_path: Path, plan: bool
) -> None:
    run = Run(tmp_path, 3, plan=plan, budget=BUDGET // 2)
    with torch._C.DisableTorchFunctionSubclass():
        for _ in range(3):
            run.right_step()
    run.engine.close()
