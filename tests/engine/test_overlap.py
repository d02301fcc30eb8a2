"""Updates that are put off to the next forward: nobody can tell, except by the clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar import utils
from patrickstar.engine.engine import Engine
from patrickstar.engine.initialize import RunSettings, make_engine
from patrickstar.engine.optimizer import ChunkedOptimizer
from patrickstar.engine.overlap import overlapped
from patrickstar.errors import ChunkStateError
from patrickstar.memory import Access, Moment, Trace, Use
from patrickstar.models import GPT, GPTConfig
from tests.interrupts import interrupted_at

from .test_training import MIB, Mlp, numbers
from .training import run_engine, run_plain, settings

HOST = int(0.8 * MIB)
PLANNED = 3  # steps, after which every step puts its updates off


def how(disk: Path, **options: Any) -> RunSettings:
    return settings(host=HOST, disk=disk, chunk=9000, **options)


def trained(
    disk: Path, steps: int = PLANNED, *, overlap: bool = True, **options: Any
) -> tuple[Engine, ChunkedOptimizer]:
    torch.manual_seed(0)
    chosen = dataclasses.replace(how(disk, clipping=0.05, **options), overlap_update=overlap)
    engine, optimizer = make_engine(Mlp, chosen)
    for batch in numbers(steps, 8, 64):
        step(engine, optimizer, batch["x"])
    return engine, optimizer


def step(engine: Engine, optimizer: ChunkedOptimizer, x: torch.Tensor) -> float:
    loss = engine(x)
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def is_put_off(engine: Engine) -> bool:
    return engine.memory.has_due()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_puts_updates_off_has_the_bits_of_an_ordinary_loop(
    precision: str, accumulation: int, tmp_path: Path
) -> None:
    batches = numbers(8, 8, 64)
    if precision == "bf16":
        batches = [{"x": b["x"].bfloat16()} for b in batches]
    options: dict[str, Any] = {
        "precision": precision,
        "accumulation": accumulation,
        "clipping": 0.05,
    }
    expected = run_plain(Mlp, batches, **options)
    for device, host in ((None, HOST), (None, MIB), (MIB, MIB), (None, 4 * MIB)):
        seen: list[bool] = []
        got = run_engine(
            Mlp,
            batches,
            settings(device=device, host=host, disk=tmp_path, chunk=9000, **options),
            look=lambda engine, _, seen=seen: seen.append(is_put_off(engine)),  # type: ignore[misc]
            keep_gradients=False,
        )
        got.gradients = expected.gradients
        got.assert_same(expected)
        # Nothing is put off where everything fits.
        assert any(seen) == (host < 4 * MIB)


def test_an_iteration_with_updates_in_it_follows_its_plan_to_the_end(tmp_path: Path) -> None:
    engine, optimizer = trained(tmp_path)
    (playback,) = (
        playback
        for playback in engine.memory.plans.values()
        if len(playback.plan.trace.moments[0].uses) > 2  # begins with an update
    )
    for batch in numbers(2, 8, 64):
        playback.restart()
        step(engine, optimizer, batch["x"])
        assert not playback.strayed
        assert playback.position == len(playback.plan.trace.moments) - 1
    engine.close()


LOOKS: dict[str, Callable[[Engine], Any]] = {
    "data": lambda engine: [p.data.clone() for p in engine.parameters()],
    "state_dict": lambda engine: list(engine.state_dict().values()),
    "norm": lambda engine: [p.norm() for p in engine.parameters()],
    "evaluation": lambda engine: [_evaluate(engine)],
    "inference": lambda engine: [_infer(engine)],
}


def _evaluate(engine: Engine) -> torch.Tensor:
    with torch.no_grad():
        return engine(torch.ones(8, 64))  # type: ignore[no-any-return]


def _infer(engine: Engine) -> torch.Tensor:
    with torch.inference_mode():
        return engine(torch.ones(8, 64)).clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_update(look: str, tmp_path: Path) -> None:
    seen, losses = [], []
    for overlap in (True, False):
        engine, optimizer = trained(tmp_path, overlap=overlap)
        assert is_put_off(engine) == overlap
        seen.append(LOOKS[look](engine))
        losses.append([step(engine, optimizer, b["x"]) for b in numbers(3, 8, 64)])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert losses[0] == losses[1]


def test_hyperparameters_are_those_of_the_step(tmp_path: Path) -> None:
    weights = []
    for overlap in (True, False):
        engine, optimizer = trained(tmp_path, overlap=overlap)
        for number, batch in enumerate(numbers(3, 8, 64)):
            step(engine, optimizer, batch["x"])
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
        weights.append(engine.state_dict())
        engine.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _add(engine: Engine) -> None:
    with torch.no_grad():
        for p in engine.parameters():
            p.add_(0.25)


def _set_gradients(engine: Engine) -> None:
    for p in engine.parameters():
        assert p.grad is None
        p.grad = torch.full_like(p, 0.01)


def _other_shape(engine: Engine) -> None:
    loss = engine(torch.ones(4, 64))
    engine.backward(loss)


def _half_a_forward(engine: Engine) -> None:
    def stop(*_: Any) -> None:
        raise KeyError("stop")

    handle = engine.module.down[2].register_forward_hook(stop)
    with pytest.raises(KeyError):
        engine(torch.ones(8, 64))
    handle.remove()


def _step_again(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.step()


def _autocast(engine: Engine) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        engine(torch.ones(8, 64))


def _first(engine: Engine) -> Any:
    return next(engine.parameters())


def _set_value(engine: Engine) -> None:
    utils.safe_set_full_fp32_param(_first(engine), torch.full(_first(engine).shape, 0.0123))


def _set_state(engine: Engine) -> None:
    state = torch.full(_first(engine).shape, 0.5)
    utils.safe_set_full_optimizer_state(_first(engine), state, "exp_avg")


def _set_gradient(engine: Engine) -> None:
    utils.safe_set_full_grad(_first(engine), torch.full(_first(engine).shape, 0.5))


def _take_gradients_away(engine: Engine) -> None:
    for p in engine.parameters():
        p.grad = None


def _load_weights(engine: Engine) -> None:
    engine.load_state_dict({name: w * 0.5 for name, w in engine.state_dict().items()})


def _load_states(engine: Engine) -> None:
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())


def _give_data(engine: Engine) -> None:
    _first(engine).data = torch.full(_first(engine).shape, 0.25, dtype=_first(engine).dtype)


BETWEEN = [
    _add,
    _set_gradients,
    _other_shape,
    _half_a_forward,
    _step_again,
    _autocast,
    _set_value,
    _set_state,
    _set_gradient,
    _take_gradients_away,
    _load_weights,
    _load_states,
    _give_data,
]


@pytest.mark.parametrize(
    "between",
    BETWEEN,
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_comes_between_a_step_and_the_next_forward_makes_no_difference(
    between: Callable[[Engine], None], precision: str, tmp_path: Path
) -> None:
    outcomes = []
    for overlap in (True, False):
        engine, optimizer = trained(tmp_path, overlap=overlap, precision=precision)
        assert is_put_off(engine) == overlap
        between(engine)
        losses = [step(engine, optimizer, b["x"]) for b in numbers(4, 8, 64)]
        outcomes.append((losses, engine.state_dict(), optimizer.grad_norm))
        engine.close()
    (losses, weights, norm), (expected, others, other_norm) = outcomes
    assert losses == expected and norm == other_norm
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_an_array_over_a_weight_shows_the_update_at_once(tmp_path: Path) -> None:
    engine, optimizer = trained(tmp_path)
    weight = engine.module.down[0].weight
    array = weight.detach().numpy()
    before = array.copy()
    loss = engine(numbers(1, 8, 64)[0]["x"])
    engine.backward(loss)
    optimizer.step()
    assert is_put_off(engine)  # the others are
    assert (array != before).any()
    assert (weight.detach().numpy() == array).all()
    engine.close()


def test_a_graph_from_before_the_step_is_refused_as_ever(tmp_path: Path) -> None:
    engine, optimizer = trained(tmp_path)
    x = numbers(1, 8, 64)[0]["x"]
    loss = engine(x)
    engine.backward(loss, retain_graph=True)
    optimizer.step()
    assert is_put_off(engine)
    with pytest.raises(RuntimeError, match="changed in place"):
        engine.backward(loss)
    engine.close()


def test_a_checkpoint_after_a_step_has_its_update(tmp_path: Path) -> None:
    losses = []
    for overlap in (True, False):
        for background in (True, False):
            engine, optimizer = trained(tmp_path, overlap=overlap)
            folder = tmp_path / f"{overlap}-{background}"
            engine.save_checkpoint(folder, asynchronous=background)
            step(engine, optimizer, numbers(1, 8, 64)[0]["x"])
            engine.close()
            torch.manual_seed(1)
            engine, optimizer = make_engine(Mlp, how(tmp_path, clipping=0.05))
            engine.load_checkpoint(folder)
            losses.append([step(engine, optimizer, b["x"]) for b in numbers(4, 8, 64)])
            engine.close()
    assert all(losses[0] == others for others in losses[1:])


def test_what_is_due_has_the_room_that_activations_had(tmp_path: Path) -> None:
    shape = GPTConfig(
        layers=2, width=128, heads=4, vocabulary=1000, checkpointing="non-reentrant"
    )  # fmt: skip
    memory = {"host": 2816709, "disk": str(tmp_path)}
    engine, optimizer = patrickstar.initialize_engine(
        lambda: GPT(shape),
        {"bf16": {"enabled": True}, "patrickstar": {"memory": memory, "chunk_size": 8192}},
    )
    tokens = torch.randint(0, 1000, (3, 64))
    for _ in range(6):
        engine.backward(engine(tokens, tokens))
        optimizer.step()
    assert is_put_off(engine)
    engine.close()  # makes the updates; a BudgetError before


def test_an_interrupt_in_a_forward_that_makes_updates_costs_no_bit(tmp_path: Path) -> None:
    batches = numbers(120, 8, 64)
    expected = run_plain(Mlp, batches, clipping=0.05).losses
    engine, optimizer = trained(tmp_path)

    def right_step() -> None:
        number = engine.global_steps
        assert step(engine, optimizer, batches[number]["x"]) == expected[number]

    redone = refused = 0
    with interrupted_at(None) as lines:
        right_step()
    anywhere = [("", line) for line in range(100, lines.seen // 2, lines.seen // 24)]
    # And once where nothing but an update runs, wherever the plan has put it.
    for among, line in [*anywhere, ("optim", 20)]:
        engine.save_checkpoint(tmp_path / "saved", tag="last")
        for _ in range(4):  # an interrupt may cost the plan
            right_step()
            if is_put_off(engine):
                break
        assert is_put_off(engine)
        with suppress(KeyboardInterrupt), interrupted_at(line, among):
            engine(batches[engine.global_steps]["x"])
        try:
            right_step()
            redone += 1
        except ChunkStateError:
            engine.load_checkpoint(tmp_path / "saved")
            refused += 1
            right_step()
    assert redone and refused
    engine.close()


class Lookup(nn.Module):
    """Its embedding's backward needs no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 16)
        self.rest = nn.ModuleList(nn.Linear(16, 512) for _ in range(12))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.table(index)
        return torch.stack([layer(x).square().mean() for layer in self.rest]).sum()


def test_a_gradient_that_comes_before_the_update_is_added_to_none(tmp_path: Path) -> None:
    weights = []
    for overlap in (True, False):
        torch.manual_seed(0)
        chosen = settings(host=MIB, disk=tmp_path, chunk=9000)
        engine, optimizer = make_engine(Lookup, dataclasses.replace(chosen, overlap_update=overlap))
        index = torch.arange(4)
        for _ in range(PLANNED):
            step(engine, optimizer, index)
        loose = engine.module.table(index).sum()  # the update of the table is made here
        engine.backward(engine(index))
        optimizer.step()
        assert is_put_off(engine) == overlap
        loose.backward()  # reaches the gradient chunk, whose old contents are still due
        engine.backward(engine(index))
        optimizer.step()
        weights.append(engine.state_dict())
        engine.close()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_updates_go_in_front_of_the_first_use_of_their_weights() -> None:
    read, update = Access.READ, Access.UPDATE
    step_of = {
        1: (Use(11, read), Use(1, update)),
        2: (Use(12, read), Use(2, update)),
        3: (Use(13, read), Use(3, update)),
    }
    trace = Trace(
        [
            Moment((Use(2, read),), {0: 5}),
            Moment((Use(1, read),), {0: 7}, held={0: (2, 9)}),
            Moment((Use(2, read),), {0: 6}),
            *(Moment(uses, {}, (10 + number,)) for number, uses in step_of.items()),
        ],
        [(0, "forward"), (2, "backward"), (3, "step")],
    )
    trace.moments[-1].blanked = (13, 11, 12)
    found = overlapped(trace, {c: c % 10 for c in (1, 2, 3, 11, 12, 13)})
    assert found is not None
    assert [moment.uses for moment in found.moments] == [
        step_of[2],
        (Use(2, read),),
        step_of[1],
        (Use(1, read),),
        (Use(2, read),),
        step_of[3],
    ]
    assert found.segments == [(0, "forward"), (4, "backward"), (5, "step")]
    assert [moment.blanked for moment in found.moments] == [(12,), (), (11,), (), (), (13,)]
    assert [moment.other for moment in found.moments][:4] == [{0: 5}, {0: 5}, {0: 5}, {0: 7}]
    assert found.moments[2].held == {0: (2, 9)}


def test_room_that_a_plan_had_for_its_last_moment_is_free_after_the_step(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(400, 64)
            self.head = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(x)).square().mean()

    how = settings(device=470 << 10, host=1 << 20, disk=tmp_path, chunk=1000, update_on="device")
    engine, optimizer = make_engine(Table, how)
    account = engine.memory.ledger.tiers[0]
    for _ in range(4):
        engine.backward(engine(torch.arange(8)[None]))
        optimizer.step()
        assert account.other < 400 * 64 * 4, "the gradient of the table is in its chunk by now"
        optimizer.zero_grad()
    engine.state_dict()
    engine.close()
