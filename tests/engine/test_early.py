"""Updates in the backward: the bits of updates in the step, and nobody sees a weight too early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.engine.early import brought_forward
from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.errors import ChunkStateError, ConfigError
from patrickstar.memory import Access, Moment, Trace, Use
from patrickstar.optim import Lamb

from .test_training import MIB, Mlp, numbers
from .training import Batches, Outcome, Provider, settings

BUDGETS = [(None, int(0.8 * MIB)), (MIB, MIB)]


def how(disk: Path | None, *, early: bool = True, **options: Any) -> RunSettings:
    options = {"host": int(0.8 * MIB), "chunk": 9000, **options}
    return dataclasses.replace(settings(disk=disk, **options), update_in_backward=early)


def made(chosen: RunSettings, provider: Provider = Mlp) -> tuple[Engine, ChunkedOptimizer]:
    torch.manual_seed(0)
    return make_engine(provider, chosen)


def are_early(engine: Engine) -> int:
    """How many parameters have been updated before their step, which has not come yet."""
    with torch._C.DisableTorchFunctionSubclass():
        return len(engine._segments._early.updated)


def run(provider: Provider, batches: Batches, chosen: RunSettings) -> tuple[Outcome, list[int]]:
    """Losses, gradient norms and weights, and how many parameters each backward has updated."""
    engine, optimizer = made(chosen, provider)
    outcome, early = Outcome(), []
    for batch in batches:
        loss = engine(**batch)
        engine.backward(loss)
        early.append(are_early(engine))
        optimizer.step()
        optimizer.zero_grad()
        outcome.losses += [loss.item(), engine.get_global_grad_norm() or math.nan]
    outcome.weights = {k: v.clone() for k, v in engine.state_dict().items()}
    engine.close()
    return outcome, early


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 2), ("bf16", 1)])
def test_updates_in_the_backward_have_the_bits_of_updates_in_the_step(
    precision: str, accumulation: int, tmp_path: Path
) -> None:
    batches = numbers(4 * accumulation, 8, 64)
    if precision == "bf16":
        batches = [{"x": b["x"].bfloat16()} for b in batches]
    options = {"precision": precision, "accumulation": accumulation}
    plain, never = run(Mlp, batches, how(None, early=False, host=None, **options))
    for device, host in [*BUDGETS, (None, 8 * MIB)][accumulation - 1 :]:
        got, early = run(Mlp, batches, how(tmp_path, device=device, host=host, **options))
        got.assert_same(plain)
        assert not any(early[:accumulation]), "the first iteration is watched"
        *others, last = early[-accumulation:]
        assert not any(others), "of an accumulation"
        # What comes last in the backward is left to the forward, if anything moves.
        assert last == 25 if host == 8 * MIB else 12 < last < 25
    assert not any(never)


class Odd(nn.Module):
    """Layers whose gradients come late, never, several times, or are looked at on the way."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.twice, self.unused = (nn.Linear(64, 64) for _ in range(3))
        self.recurrent = nn.LSTM(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.detached = nn.Linear(64, 64, bias=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.first(x).requires_grad_()
        for _ in range(2):
            x = x + checkpoint(self.twice, x, use_reentrant=self.reentrant)
        x = self.recurrent(x)[0]
        if self.calls % 4 == 0:
            x = x + self.sometimes(x)
        # Read by a backward that runs after the gradient of the weight is complete.
        late = nn.functional.linear(x, self.detached.weight.detach())
        return (self.detached(late.detach()) + late).float().square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_that_are_not_so_plain_are_updated_in_the_step(
    reentrant: bool, tmp_path: Path
) -> None:
    def provider() -> nn.Module:
        return Odd(reentrant=reentrant)

    batches = numbers(6, 8, 64)
    plain, _ = run(provider, batches, how(None, early=False, host=None, chunk=5000))
    for overlap, (device, host) in zip((True, False), BUDGETS, strict=True):
        chosen = how(tmp_path, device=device, host=host, chunk=5000)
        got, early = run(provider, batches, dataclasses.replace(chosen, overlap_update=overlap))
        got.assert_same(plain)
    # The weights of `first` and `recurrent`, whose biases share a chunk with `sometimes`.
    assert max(early) == 2 + 2 + (0 if reentrant else 2)


def test_a_rule_of_whole_tensors_has_the_same_bits(tmp_path: Path) -> None:
    rule = Lamb()
    options: dict[str, Any] = {"rule": rule, "hyper": {"lr": 1e-2}}
    batches = numbers(4, 8, 64)
    plain, _ = run(Mlp, batches, how(None, early=False, host=None, **options))
    got, early = run(Mlp, batches, how(tmp_path, **options))
    got.assert_same(plain)
    assert early[-1] > 12


def test_pieces_of_one_parameter_are_updated_one_by_one(tmp_path: Path) -> None:
    """Each is a slice of one tensor, and they must not share a version counter."""
    wide, small = {"piece_size": 2048}, {"chunk": 2500}
    batches = numbers(4, 8, 64)
    plain = dataclasses.replace(how(None, early=False, host=None, **small), **wide)
    expected, _ = run(Mlp, batches, plain)
    got, early = run(Mlp, batches, dataclasses.replace(how(tmp_path, **small), **wide))
    got.assert_same(expected)
    assert early[-1] > 12


def test_gradients_do_not_outlive_the_backward_and_the_plan_is_followed(tmp_path: Path) -> None:
    engine, optimizer = made(how(tmp_path))
    batches = numbers(4, 8, 64)
    for batch in batches[:-1]:
        engine.backward(engine(**batch))
        optimizer.step()
    engine.backward(engine(**batches[-1]))
    for playback in engine.memory.plans.values():
        assert not playback.strayed
    kept = 0
    for parameter in engine.parameters():
        with suppress(ChunkStateError):
            kept += parameter.grad is not None
    assert kept == 25 - are_early(engine) < 12
    engine.close()


def test_a_kept_graph_leaves_the_update_to_the_next_backward(tmp_path: Path) -> None:
    def trained(early: bool) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
        engine, optimizer = made(how(tmp_path, early=early))
        losses, seen = [], []
        for batch in numbers(4, 8, 64):
            loss = engine(**batch)
            engine.backward(loss, retain_graph=True)
            seen.append(are_early(engine))
            engine.backward(loss * 2)
            seen.append(are_early(engine))
            optimizer.step()
            losses.append(loss.item())
        weights = {name: w.clone() for name, w in engine.state_dict().items()}
        engine.close()
        return losses, weights, seen

    losses, weights, seen = trained(True)
    expected, theirs, _ = trained(False)
    assert losses == expected
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)
    assert seen[-2] == 0 < seen[-1]


def ready(disk: Path, batches: Batches, **options: Any) -> tuple[Engine, ChunkedOptimizer]:
    """An engine whose last backward has updated weights, and whose step has not come."""
    engine, optimizer = made(how(disk, **options))
    for number, batch in enumerate(batches):
        engine.backward(engine(**batch))
        if number < len(batches) - 1:
            optimizer.step()
    assert are_early(engine)
    return engine, optimizer


def last_first(engine: Engine) -> list[nn.Parameter]:
    """The first are not updated early."""
    return [*engine.parameters()][::-1]


LOOKS: dict[str, Callable[[Engine, Path], Any]] = {
    "forward": lambda engine, _: engine(torch.ones(8, 64)),
    "evaluation": lambda engine, _: torch.no_grad()(engine)(torch.ones(8, 64)),
    "data": lambda engine, _: [p.data for p in engine.parameters()],
    "write": lambda engine, _: [p.detach().zero_() for p in last_first(engine)],
    "state_dict": lambda engine, _: engine.state_dict(),
    "optimizer": lambda engine, _: engine.optimizer.state_dict(),  # type: ignore[union-attr]
    "save": lambda engine, folder: engine.save_checkpoint(folder),
    "zero_grad": lambda engine, _: engine.zero_grad(),
    "gradient": lambda engine, _: torch.nn.utils.clip_grad_value_(engine.parameters(), 1.0),
    "no gradient": lambda engine, _: [setattr(p, "grad", None) for p in last_first(engine)],
    "clip": lambda engine, _: engine.optimizer.clip_grad_norm_(1.0),  # type: ignore[union-attr]
}


def assert_goes_on(
    engine: Engine, optimizer: ChunkedOptimizer, batches: Batches, plain: Outcome
) -> None:
    """The run ends with the weights of the plain one."""
    for batch in batches:
        engine.backward(engine(**batch))
        optimizer.step()
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], plain.weights[name]) for name in plain.weights)
    engine.close()


def test_nobody_sees_a_weight_between_the_backward_and_its_step(tmp_path: Path) -> None:
    batches = numbers(5, 8, 64)
    plain, _ = run(Mlp, batches, how(None, early=False, host=None))
    engine, optimizer = ready(tmp_path, batches[:3])
    for look in LOOKS.values():
        with pytest.raises(ChunkStateError, match="update_in_backward"):
            look(engine, tmp_path)
    loss = (torch.ones(1, requires_grad=True) * 2).sum()
    with pytest.raises(ChunkStateError, match="call step"):
        engine.backward(loss)
    optimizer.step()
    assert_goes_on(engine, optimizer, batches[3:], plain)


def test_a_rate_that_changes_between_the_backward_and_its_step_is_refused(tmp_path: Path) -> None:
    engine, optimizer = ready(tmp_path, numbers(3, 8, 64))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ChunkStateError, match=r"'lr' of parameter group 0 was 0\.01"):
        optimizer.step()
    with pytest.raises(ChunkStateError, match="load_checkpoint"):
        engine(torch.ones(8, 64))
    engine.close()


class Stumbling(Mlp):
    """Its backward fails half-way if it is told to."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fails:
            return super().forward(x)
        half = len(self.blocks) // 2
        for number, (up, down) in enumerate(zip(self.blocks, self.down, strict=True)):
            x = x + down(up(x))
            if number == half:
                x.register_hook(_stumble)
        return (self.head(x) - self.other_head(x.roll(1, 0))).float().square().mean()


def _stumble(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("where", ["backward", "before the step"])
def test_a_run_goes_on_from_a_checkpoint(where: str, tmp_path: Path) -> None:
    batches = numbers(6, 8, 64)
    plain, _ = run(Stumbling, batches, how(None, early=False, host=None))
    engine, optimizer = made(how(tmp_path), Stumbling)
    for batch in batches[:3]:
        engine.backward(engine(**batch))
        optimizer.step()
    engine.save_checkpoint(tmp_path / "saved")
    engine.module.fails = where == "backward"  # type: ignore[assignment]
    loss = engine(**batches[3])
    with suppress(ZeroDivisionError):
        engine.backward(loss)
    if where == "backward":
        assert are_early(engine), "some weights were updated"
        with pytest.raises(ChunkStateError, match="load_checkpoint"):
            optimizer.step()
    engine.module.fails = False  # type: ignore[assignment]
    engine.load_checkpoint(tmp_path / "saved")
    assert_goes_on(engine, optimizer, batches[3:], plain)


def test_a_checkpoint_that_is_written_meanwhile_has_the_weights_of_its_step(tmp_path: Path) -> None:
    engine, optimizer = made(how(tmp_path))
    batches = numbers(5, 8, 64)
    for batch in batches[:3]:
        engine.backward(engine(**batch))
        optimizer.step()
    saved = {name: w.clone() for name, w in engine.state_dict().items()}
    engine.save_checkpoint(tmp_path / "saved", asynchronous=True)
    for batch in batches[3:]:
        engine.backward(engine(**batch))
        assert are_early(engine)
        optimizer.step()
    engine.load_checkpoint(tmp_path / "saved")
    weights = engine.state_dict()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
    engine.close()


def test_what_waits_for_all_gradients_is_refused_at_initialize() -> None:
    with pytest.raises(ConfigError, match=r"gradient_clipping 0\.5 .* set gradient_clipping to 0"):
        how(None, clipping=0.5)
    with pytest.raises(ConfigError, match="check_grad_overflow"):
        dataclasses.replace(how(None, precision="bf16"), skip_overflow=True)


def trace_of(stores: Sequence[Use], *, after: Sequence[Moment] = ()) -> Trace:
    """A forward and backward of two chunks, 1 and 2, with gradients 11 and 12."""
    read, update = Access.READ, Access.UPDATE
    forward = [Moment((Use(1, read),), {0: 5}), Moment((Use(2, read),), {0: 9})]
    backward = [Moment((use,), {0: 7}) for use in stores]
    step = [
        Moment((Use(10 + n, read), Use(n, update), Use(20 + n, update)), {0: 1}, (10 + n,))
        for n in (1, 2)
    ]
    segments = [(0, "forward"), (2, "backward"), (2 + len(stores) + len(after), "step")]
    return Trace([*forward, *backward, *after, *step], segments)


FAMILY = {1: 1, 11: 1, 21: 1, 2: 2, 12: 2, 22: 2}
STORES = (Use(12, Access.OVERWRITE), Use(1, Access.READ), Use(11, Access.OVERWRITE))


def test_updates_move_to_right_after_their_last_gradient() -> None:
    trace = trace_of(STORES)
    found = brought_forward(trace, FAMILY, {1, 2}, lambda moment: True)
    assert found is not None
    moments = found[0].moments
    assert [moment.uses[0].chunk for moment in moments] == [1, 2, 12, 12, 1, 11, 11]
    assert [moment.blanked for moment in moments][3::3] == [(12,), (11,)]
    assert moments[3].other == {0: 7}
    assert found[0].segments == [(0, "forward"), (2, "backward"), (7, "step")]
    assert found[1] == [2, 1]


@pytest.mark.parametrize(
    ("trace", "plain", "room"),
    [
        (trace_of(STORES), {1}, True),  # gradients come twice
        (trace_of(STORES, after=[Moment((Use(2, Access.READ),))]), {1, 2}, True),
        (trace_of(STORES, after=[Moment((Use(5, Access.READ),), held={0: (2,)})]), {1, 2}, True),
        (trace_of(STORES), {1, 2}, False),
    ],
)
def test_an_update_stays_in_the_step_if_it_might_be_too_early(
    trace: Trace, plain: set[int], room: bool
) -> None:
    family = {**FAMILY, 5: -1}
    found = brought_forward(trace, family, plain, lambda moment: room or moment.uses[0].chunk != 12)
    assert found is not None
    assert found[1] == [1]
    assert found[0].moments[-1].uses[0].chunk == 12
    assert found[0].segments[-1] == (len(found[0].moments) - 1, "step")
