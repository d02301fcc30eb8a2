"""What models do in a training loop, each with the bits of an ordinary loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from patrickstar.engine.initialize import make_engine
from patrickstar.errors import BudgetError, ConfigError
from patrickstar.optim import SGD, Adam

from .training import run_engine, run_plain, settings

MIB = 1 << 20


def numbers(count: int, *shape: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(*shape, generator=generator)} for _ in range(count)]


class Mlp(nn.Module):
    """A few blocks with norms and biases, and a tied pair of weights."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU())
            for _ in range(depth)
        )
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = nn.Parameter(torch.empty(width, width))
        self.other_head = nn.Linear(width, width, bias=False)
        self.other_head.weight = self.head.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
            if module.bias is not None:
                with torch.no_grad():
                    module.bias.uniform_(-0.1, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.blocks, self.down, strict=True):
            x = x + down(up(x))
        return (self.head(x) - self.other_head(x.roll(1, 0))).float().square().mean()


def budgets(tmp_path: Path, **how: Any) -> list[Any]:
    """No budget, one that makes chunks move, and the same with devices of two kinds."""
    return [
        settings(chunk=9000, **how),
        settings(host=1 * MIB, disk=tmp_path, chunk=9000, **how),
        settings(device=int(0.9 * MIB), host=1 * MIB, disk=tmp_path, chunk=9000, **how),
        settings(
            device=int(0.9 * MIB), host=2 * MIB, disk=tmp_path, chunk=9000, accelerator=True, **how
        ),
    ]


@pytest.mark.parametrize("accelerator", [False, True])
def test_updates_may_run_on_the_device(accelerator: bool, tmp_path: Path) -> None:
    batches = numbers(6, 8, 64)
    expected = run_plain(Mlp, batches)
    how = settings(
        device=MIB,
        host=MIB,
        disk=tmp_path,
        chunk=9000,
        accelerator=accelerator,
        update_on="device",
    )
    got = run_engine(Mlp, batches, how, keep_gradients=False)
    got.gradients = expected.gradients
    got.assert_same(expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_clipping_and_precision_keep_the_bits(
    precision: str, clipping: float, tmp_path: Path
) -> None:
    batches = numbers(6, 8, 64)
    if precision == "bf16":
        batches = [{"x": b["x"].bfloat16()} for b in batches]
    expected = run_plain(Mlp, batches, precision=precision, clipping=clipping)
    for how in budgets(tmp_path, precision=precision, clipping=clipping):
        got = run_engine(Mlp, batches, how, keep_gradients=how.host_budget is None)
        got.gradients = got.gradients or expected.gradients
        got.assert_same(expected)


def test_accumulated_gradients_are_those_of_ordinary_accumulation(tmp_path: Path) -> None:
    batches = numbers(8, 8, 64)
    expected = run_plain(Mlp, batches, accumulation=4, clipping=1.0)
    for how in budgets(tmp_path, accumulation=4, clipping=1.0):
        got = run_engine(Mlp, batches, how)
        got.assert_same(expected)


def test_parameter_groups_have_their_own_hyperparameters(tmp_path: Path) -> None:
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = dict(module.named_parameters())
        return [
            {"params": [p for p in named.values() if p.dim() > 1]},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.1},
        ]

    batches = numbers(5, 8, 64)
    expected = run_plain(Mlp, batches, groups=groups)
    for how in budgets(tmp_path):
        run_engine(Mlp, batches, how, param_groups=groups).assert_same(expected)


@pytest.mark.parametrize(
    ("rule", "reference", "hyper"),
    [
        (Adam(), torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
        (SGD(), torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    ],
    ids=["Adam", "SGD"],
)
def test_other_optimizers_keep_their_bits_too(
    rule: Any, reference: Any, hyper: dict[str, Any], tmp_path: Path
) -> None:
    batches = numbers(5, 8, 64)
    expected = run_plain(Mlp, batches, optimizer_class=reference, hyper=hyper)
    for how in budgets(tmp_path, rule=rule, hyper=hyper):
        run_engine(Mlp, batches, how).assert_same(expected)


class Recurrent(nn.Module):
    """One module called several times, so that its weights get gradients more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True)
        self.shared = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.shared(x))
        first, _ = self.lstm(x)
        second, _ = self.lstm(first.flip(1))
        return self.shared(second).square().mean()


class Elsewhere(nn.Module):
    """Parameters used outside their owner's forward, as views, and in a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 64)
        self.layer = nn.Linear(64, 64)
        self.gain = nn.Parameter(torch.ones(64))
        self.many = nn.ParameterList(nn.Parameter(torch.randn(64, 64) * 0.1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, self.layer.weight, self.layer.bias)
        h = Scale.apply(h, self.gain)
        for weight in self.many:
            h = h + F.gelu(h) @ weight.t()
        h = torch.func.functional_call(self.layer, dict(self.layer.named_parameters()), (h,))
        logits = h @ self.embed.weight[:8].T
        return logits.square().mean() + self.gain.data.sum() * 0


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum(0)


class Unused(nn.Module):
    """Which parameters take part changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if (self.calls + index) % 3:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16 * 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.conv(x.view(-1, 8, 8))))
        return self.out(h.flatten(1)).square().mean()


class Renormed(nn.Module):
    """A forward that writes into weights: `max_norm` scales rows that are too long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 32, max_norm=1.0)
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table((x.abs() * 60).long().clamp(max=255))
        return self.layers(rows).square().mean()


class ChannelsLast(nn.Module):
    """Weights of other strides, for which other kernels are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4)
        ).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.view(-1, 1, 8, 8)).square().mean()


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)
        )
        self.use_reentrant = use_reentrant
        if frozen:
            self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "recurrent": (Recurrent, (4, 6, 16)),
    "elsewhere": (Elsewhere, (8, 64)),
    "unused": (Unused, (8, 64)),
    "buffers": (Buffers, (6, 64)),
    "max_norm": (Renormed, (8, 8)),
    "channels last": (ChannelsLast, (4, 64)),
    "reentrant": (lambda: Recomputed(True), (8, 64)),
    "non-reentrant": (lambda: Recomputed(False), (8, 64)),
    "reentrant, frozen": (lambda: Recomputed(True, frozen=True), (8, 64)),
    "non-reentrant, frozen": (lambda: Recomputed(False, frozen=True), (8, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_does_unusual_things_keeps_its_bits(name: str, tmp_path: Path) -> None:
    provider, shape = MODELS[name]
    batches = numbers(6, *shape)
    expected = run_plain(provider, batches)
    tight = int(0.3 * MIB)
    while True:  # the tightest budget that works, and two above it
        try:
            run_engine(provider, batches[:2], settings(host=tight, disk=tmp_path, chunk=4096))
            break
        except BudgetError as error:
            tight = error.smallest
    for how in (
        settings(),
        settings(host=tight, disk=tmp_path, chunk=4096),
        settings(host=int(tight * 1.3), disk=tmp_path, chunk=4096),
        settings(device=int(tight * 1.2), host=int(tight * 1.2), disk=tmp_path, chunk=4096),
    ):
        got = run_engine(provider, batches, how, keep_gradients=how.host_budget is None)
        got.gradients = got.gradients or expected.gradients
        got.assert_same(expected)


def test_a_ready_module_is_accepted_and_keeps_its_parameters_identity(tmp_path: Path) -> None:
    batches = numbers(4, 8, 64)
    expected = run_plain(Mlp, batches)
    torch.manual_seed(0)
    module = Mlp()
    before = list(module.parameters())
    engine, optimizer = make_engine(module, settings(host=MIB, disk=tmp_path, chunk=9000))
    assert all(a is b for a, b in zip(engine.parameters(), before, strict=True))
    losses = []
    for batch in batches:
        loss = engine(**batch)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected.losses
    engine.close()


def test_evaluation_before_training_and_between_steps_changes_nothing(tmp_path: Path) -> None:
    batches = numbers(5, 8, 64)
    expected = run_plain(Mlp, batches)
    held_out = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    seen = []

    def look(engine: Any, optimizer: Any) -> None:
        engine.eval()
        with torch.no_grad():
            seen.append(engine(held_out).item())
        engine.train()

    torch.manual_seed(0)
    engine, _ = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    with torch.no_grad():
        first = engine(held_out).item()
    engine.close()
    torch.manual_seed(0)
    assert first == Mlp()(held_out).item()
    how = settings(host=MIB, disk=tmp_path, chunk=9000)
    got = run_engine(Mlp, batches, how, look=look, keep_gradients=False)
    got.gradients = expected.gradients
    got.assert_same(expected)
    assert len(set(seen)) == len(batches)


def test_several_forwards_before_one_backward(tmp_path: Path) -> None:
    batches = numbers(8, 8, 64)

    def losses(how: Any) -> list[float]:
        torch.manual_seed(0)
        engine, optimizer = make_engine(Mlp, how)
        seen = []
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            loss = engine(**first) + 2 * engine(**second)
            engine.backward(loss)
            optimizer.step()
            seen.append(loss.item())
        engine.close()
        return seen

    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.AdamW(
        module.parameters(), fused=True, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95)
    )
    expected = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        loss = module(**first) + 2 * module(**second)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for how in budgets(tmp_path):
        assert losses(how) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_change_from_outside_the_engine_is_kept(precision: str, tmp_path: Path) -> None:
    """A weight scaled by hand between steps trains on from its new value, masters included."""
    batches = [{"x": b["x"].to(torch.bfloat16)} for b in numbers(4, 8, 64)]
    if precision == "fp32":
        batches = numbers(4, 8, 64)

    def change(engine: Any, optimizer: Any) -> None:
        with torch.no_grad():
            engine.head.weight.mul_(0.5)
            engine.down[1].bias.data.add_(1.0)

    results = [
        run_engine(Mlp, batches, how, look=change, keep_gradients=False)
        for how in budgets(tmp_path, precision=precision)
    ]
    untouched = run_engine(Mlp, batches, settings(precision=precision), keep_gradients=False)
    assert results[0].losses != untouched.losses
    for result in results[1:]:
        result.assert_same(results[0])
    assert results[0].weights["down.1.bias"].mean() > 2


def test_an_in_place_change_between_forward_and_backward_is_an_error(tmp_path: Path) -> None:
    engine, _ = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    loss = engine(**numbers(1, 8, 64)[0])
    with torch.no_grad():
        engine.head.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"head\.weight.*changed in place"):
        engine.backward(loss)
    engine.close()


def test_a_failing_forward_leaves_the_engine_usable(tmp_path: Path) -> None:
    batches = numbers(5, 8, 64)
    expected = run_plain(Mlp, batches)
    torch.manual_seed(0)
    engine, optimizer = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    losses = []
    for batch in batches:
        with pytest.raises(RuntimeError):
            engine(torch.randn(8, 63))
        loss = engine(**batch)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected.losses
    engine.close()


def test_gradients_can_be_read_changed_and_clipped_by_the_user(tmp_path: Path) -> None:
    batches = numbers(4, 8, 64)
    expected = run_plain(Mlp, batches, clipping=0.05)
    torch.manual_seed(0)
    engine, optimizer = make_engine(Mlp, settings(host=4 * MIB, disk=tmp_path, chunk=9000))
    losses = []
    for batch in batches:
        loss = engine(**batch)
        engine.backward(loss)
        torch.nn.utils.clip_grad_norm_(engine.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected.losses
    assert all(p.grad is None for p in engine.parameters())
    engine.close()


def test_compiled_blocks_train_under_a_budget(tmp_path: Path) -> None:
    pytest.importorskip("torch._inductor")
    batches = numbers(4, 8, 64)

    def provider() -> nn.Module:
        model = Mlp()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        model.down[0] = torch.compile(model.down[0], backend="aot_eager")  # type: ignore[assignment]
        return model

    expected = run_plain(provider, batches)
    torch._dynamo.reset()
    for how in budgets(tmp_path):
        got = run_engine(provider, batches, how)
        got.assert_same(expected)


def test_a_learning_rate_scheduler_of_torch_works(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, optimizer = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = []
    for batch in numbers(3, 8, 64):
        engine.backward(engine(**batch))
        optimizer.step()
        schedule.step()
        rates.append(engine.get_lr()[0])
    assert rates == [5e-3, 2.5e-3, 1.25e-3]
    engine.close()


def test_a_budget_below_one_update_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="smallest budget that works") as refused:
        make_engine(Mlp, settings(host=100_000, disk=tmp_path, chunk=9000))
    assert refused.value.tier == "host"
    assert refused.value.smallest > 100_000


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    engine, _ = make_engine(Mlp, settings())
    with pytest.raises(ValueError, match="scalar"):
        engine.backward(torch.zeros(3, requires_grad=True))
    with pytest.raises(ValueError, match="dict"):
        engine.backward({"loss": torch.zeros(())})  # type: ignore[arg-type]
    engine.close()


def test_a_model_without_trainable_parameters_is_refused() -> None:
    def frozen() -> nn.Module:
        return Mlp().requires_grad_(False)

    with pytest.raises(ConfigError, match="no parameter to train"):
        make_engine(frozen, settings())


def test_the_engine_behaves_as_the_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, _ = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    torch.manual_seed(0)
    module = Mlp()
    assert isinstance(engine, nn.Module)
    assert engine.train() is engine and engine.eval() is engine
    assert not engine.module.training
    assert [n for n, _ in engine.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert engine.head.weight is engine.other_head.weight
    expected = module.state_dict()
    found = engine.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing
    engine.close()


def test_loaded_weights_are_trained_from(tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = Mlp().state_dict()
    batches = numbers(3, 8, 64)

    def provider() -> nn.Module:
        model = Mlp()
        model.load_state_dict(other)
        return model

    expected = run_plain(provider, batches)
    run_engine(provider, batches, settings(host=MIB, disk=tmp_path, chunk=9000)).assert_same(
        expected
    )
    torch.manual_seed(0)
    engine, optimizer = make_engine(Mlp, settings(host=MIB, disk=tmp_path, chunk=9000))
    engine.load_state_dict(other)
    losses = []
    for batch in batches:
        loss = engine(**batch)
        engine.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected.losses
    engine.close()


@pytest.mark.parametrize("name", ["Mlp", "recurrent", "non-reentrant", "reentrant"])
def test_a_refusal_names_a_budget_that_then_works(name: str, tmp_path: Path) -> None:
    provider, shape = {**MODELS, "Mlp": (Mlp, (8, 64))}[name]
    batches = numbers(3, *shape)
    for budget in (120_000, 160_000):
        with pytest.raises(BudgetError, match="smallest") as refused:
            run_engine(provider, batches, settings(host=budget, disk=tmp_path, chunk=2048))
        smallest = refused.value.smallest
        assert smallest > budget
        if "budget that works" not in str(refused.value):
            how = settings(host=smallest, disk=tmp_path, chunk=2048)
            run_engine(provider, batches, how, keep_gradients=False)


def test_a_host_budget_without_a_disk_covers_activations_in_every_step() -> None:
    torch.manual_seed(0)
    engine, optimizer = make_engine(Mlp, settings(host=6 * MIB))
    peaks = []
    for batch in numbers(4, 512, 64):
        engine.reset_peak()
        engine.backward(engine(**batch))
        optimizer.step()
        peaks.append(engine.memory_report().tiers["host"].peak)
    engine.close()
    assert max(peaks[1:]) > engine._state.total_bytes() + 512 * 64 * 4
    assert peaks[1:] == pytest.approx([peaks[1]] * 3, rel=0.05)


def test_a_host_budget_without_a_disk_is_refused_with_one_that_works() -> None:
    with pytest.raises(BudgetError, match="smallest that works") as refused:
        run_engine(Mlp, numbers(3, 512, 64), settings(host=4 * MIB))
    how = settings(host=refused.value.smallest)
    run_engine(Mlp, numbers(3, 512, 64), how, keep_gradients=False)
    assert refused.value.smallest < 6 * MIB
