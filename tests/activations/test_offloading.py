"""`patrickstar.offload_activations`: the same numbers, less memory, nothing left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import patrickstar
from patrickstar.activations import ActivationOffloading, offloading, store
from patrickstar.errors import BudgetError, ChunkStateError, ConfigError
from patrickstar.models import GPT, GPTConfig

KIB = 1 << 10


@contextmanager
def offloaded(
    folder: Path | None = None, host: int | None = None, larger_than: int = 0, **more: Any
) -> Iterator[ActivationOffloading]:
    memory = {"host": host, "disk": None if folder is None else str(folder)}
    offload = patrickstar.offload_activations(memory=memory, larger_than=larger_than, **more)
    try:
        yield offload
    finally:
        offload.close()


@pytest.fixture(autouse=True, scope="module")
def warm_exp() -> None:
    """The first exp of a process was seen to round otherwise, in plain PyTorch; see experiments."""
    values = torch.randn(64, 64)
    for _ in range(2):
        values.exp(), values.t().exp()


def in_use(offload: ActivationOffloading) -> int:
    """Bytes that are put away now, wherever they are."""
    gc.collect()
    return sum(usage.in_use for usage in offload.memory_report().tiers.values())


def gradients(build: Callable[[], nn.Module], run: Callable[[nn.Module], torch.Tensor],
              around: Any = None) -> list[torch.Tensor]:  # fmt: skip
    """Of three steps of SGD; the losses come first."""
    torch.manual_seed(0)
    module = build()
    found = []
    for _ in range(3):
        with around or nullcontext():
            loss = run(module)
        loss.backward()
        found.append(loss.detach().clone())
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad.clone())
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def gpt(checkpointing: str | None = None) -> Callable[[], nn.Module]:
    shape = GPTConfig(layers=3, width=64, heads=4, checkpointing=checkpointing)  # type: ignore[arg-type]
    return lambda: GPT(shape)


def run_gpt(module: nn.Module) -> torch.Tensor:
    tokens = torch.arange(4 * 32).reshape(4, 32) % 256
    return module(tokens, tokens.roll(-1, 1))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    """Batch norm, dropout, pooling with indices, in-place operators, and no contiguity."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 64, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.first(images)), inplace=True)
        hidden = F.dropout(F.max_pool2d(hidden, 2), 0.3)
        turned = hidden.transpose(1, 3).pow(3)
        one, two = (turned * turned.flip(2)).chunk(2, dim=1)
        joined = torch.cat([F.hardtanh(one), two / (1 + two)], dim=1)
        return F.cross_entropy(self.last(joined.flatten(1)), torch.arange(len(images)) % 5)


def run_convolutions(module: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    images = torch.randn(6, 3, 16, 16).to(memory_format=torch.channels_last)
    return module(images)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "run"),
    [
        (gpt(), run_gpt),
        (gpt("non-reentrant"), run_gpt),
        (gpt("reentrant"), run_gpt),
        (Convolutions, run_convolutions),
    ],
    ids=["gpt", "checkpointed gpt", "reentrant", "convolutions"],
)
@pytest.mark.parametrize("host", [None, 300 * KIB], ids=["in memory", "on disk"])
def test_losses_and_gradients_are_the_same_to_the_bit(
    build: Any, run: Any, host: int | None, tmp_path: Path
) -> None:
    with offloaded(tmp_path, host) as offload:
        found = gradients(build, run, offload)
        assert same(found, gradients(build, run))
        assert offload.memory_report().tiers["host"].peak > 0
        assert in_use(offload) == 0


def test_the_budget_is_kept_and_the_rest_goes_to_the_disk(tmp_path: Path) -> None:
    with offloaded(tmp_path) as free, offloaded(tmp_path, 300 * KIB) as tight:
        gradients(gpt(), run_gpt, free)
        gradients(gpt(), run_gpt, tight)
        whole, least = free.memory_report(), tight.memory_report()
    assert whole.tiers["host"].peak > 1000 * KIB and not whole.moved
    assert least.tiers["host"].peak <= 300 * KIB
    assert least.moved["host->disk"] > 700 * KIB
    assert least.moved["disk->host"] > 700 * KIB


def test_what_the_forward_let_go_of_is_out_of_its_memory() -> None:
    import weakref

    with offloaded() as offload:
        leaf = torch.randn(1000, requires_grad=True)
        with offload:
            middle = leaf * 2
            loss = middle.exp().sum()
        alive = weakref.ref(middle.untyped_storage())
        del middle
        assert alive() is None
        loss.backward()
        assert torch.equal(leaf.grad, (leaf.detach() * 2).exp() * 2)


def test_a_budget_too_small_for_one_tensor_is_refused_with_one_that_works(tmp_path: Path) -> None:
    values = torch.randn(10_000, requires_grad=True)
    with offloaded(tmp_path, 8 * KIB) as offload:
        with pytest.raises(BudgetError) as error, offload:
            values.exp()
    with offloaded(tmp_path, error.value.smallest) as offload:
        with offload:
            loss = values.exp().sum()
        loss.backward()


def test_without_a_disk_a_full_budget_is_refused() -> None:
    values = torch.randn(1024, requires_grad=True)
    with offloaded(None, 16 * KIB) as offload:
        with pytest.raises(BudgetError, match="host budget"), offload:
            values.exp().exp().exp().exp().exp().exp()
        assert in_use(offload) == 0


def test_small_tensors_and_parameters_stay() -> None:
    layer = nn.Linear(64, 64, bias=False)
    with offloaded(larger_than=8 * KIB) as offload:
        with offload:
            loss = layer(torch.randn(8, 64)).exp().sum()  # 2 KiB each; the weight has 16
        assert in_use(offload) == 0
        loss.backward()
        assert layer.weight.grad is not None
        with offload:
            loss = layer(torch.randn(64, 64)).sum()
        assert in_use(offload) == 16 * KIB, "the input"
    del loss


def test_what_is_to_be_kept_stays_with_its_views() -> None:
    table = torch.randn(64, 64)
    values = torch.randn(64, 64, requires_grad=True)
    with offloaded(keep=[table]) as offload:
        with offload:
            loss = (values * table.t()).sum() + (values * table[3]).sum()
        assert in_use(offload) == 0
        loss.backward()
        assert torch.equal(values.grad, table.t() + table[3])


def test_views_of_one_storage_are_put_away_once() -> None:
    values = torch.randn(32, 3, 1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            product = values * 1.0
            query, key, value = product.unbind(1)
            loss = (query * key * value).sum() + product.square().sum()
        # The product, and query times key.
        assert in_use(offload) == 4 * (32 * 3 * 1024 + 32 * 1024)
        loss.backward()
        del loss
        assert in_use(offload) == 0


def test_of_a_much_larger_storage_only_what_is_used_is_put_away() -> None:
    data = torch.randn(1000, 1024)
    values = torch.randn(3, 1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            loss = (values * data[501:504]).sum()
        assert in_use(offload) == 3 * 4 * KIB
        loss.backward()
        assert torch.equal(values.grad, data[501:504])


def test_an_expanded_tensor_takes_what_it_has() -> None:
    values = torch.randn(1024, 1, requires_grad=True)
    with offloaded() as offload:
        with offload:
            loss = ((values * 1.0).expand(1024, 1024) * torch.ones(1024, 1024)).exp().sum()
        loss.backward()
        found = values.grad.clone()
        values.grad = None
        ((values * 1.0).expand(1024, 1024) * torch.ones(1024, 1024)).exp().sum().backward()
        assert torch.equal(found, values.grad)


def test_a_change_in_place_after_saving_does_not_reach_what_was_saved() -> None:
    values = torch.randn(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            middle = values * 1.0
            loss = (middle * middle.detach().clone()).sum() + (middle.square()).sum()
            middle.data.zero_()
        loss.backward()
        assert torch.allclose(values.grad, 3 * values.detach())


def test_a_storage_changed_in_place_is_put_away_again() -> None:
    values = torch.ones(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            buffer = torch.full((1024,), 2.0)
            first = values * buffer
            buffer.add_(1)
            second = values * buffer
        (first + second).sum().backward()
        assert values.grad.eq(5).all()


def test_what_stays_keeps_the_check_of_autograd() -> None:
    values = torch.randn(8, requires_grad=True)
    with offloaded(larger_than=KIB) as offload:
        with offload:
            middle = values.exp()
            loss = middle.sum()
        with torch.no_grad():
            middle.zero_()
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    values = torch.randn(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            loss = values.exp().sin().sum()
        assert in_use(offload) == 4 * KIB, "the result of exp is what sin is given"
        del loss
        gc.disable()
        try:
            assert sum(u.in_use for u in offload.memory_report().tiers.values()) == 0
        finally:
            gc.enable()


def test_small_tensors_of_a_dropped_graph_are_not_kept_by_a_cycle() -> None:
    import weakref

    values = torch.randn(8, requires_grad=True)
    with offloaded(larger_than=KIB) as offload:
        with offload:
            output = values.exp()
        storage = weakref.ref(output.untyped_storage())
        gc.disable()
        try:
            del output
            assert storage() is None
        finally:
            gc.enable()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ValueError("as asked")


def test_after_an_exception_in_the_backward_everything_goes_on(tmp_path: Path) -> None:
    values = torch.randn(4096, requires_grad=True)
    with offloaded(tmp_path, 64 * KIB) as offload:
        for _ in range(3):
            with offload:
                loss = Failing.apply(values.exp().sin()).exp().cos().exp().sin().sum()
            with pytest.raises(ValueError, match="as asked"):
                loss.backward()
            del loss
            assert in_use(offload) == 0
        with offload:
            loss = values.exp().sin().exp().cos().exp().sin().sum()
        loss.backward()
        found = values.grad.clone()
        values.grad = None
        values.exp().sin().exp().cos().exp().sin().sum().backward()
        assert torch.equal(found, values.grad)


def test_after_an_exception_in_the_forward_the_context_is_left() -> None:
    with offloaded() as offload:
        with pytest.raises(ZeroDivisionError), offload:
            raise ZeroDivisionError
        values = torch.randn(1024, requires_grad=True)
        kept = values.exp()
        assert in_use(offload) == 0 and kept.grad_fn is not None


def test_a_graph_can_be_gone_through_twice_and_differentiated_again(tmp_path: Path) -> None:
    def second(values: torch.Tensor, around: Any) -> list[torch.Tensor]:
        with around:
            loss = (values.exp().sin() * values).sum()
            (first,) = torch.autograd.grad(loss, values, create_graph=True)
            (again,) = torch.autograd.grad(loss, values, retain_graph=True)
            (other,) = torch.autograd.grad(first.square().sum(), values)
        return [first.detach(), again, other]

    values = torch.randn(4096, requires_grad=True)
    with offloaded(tmp_path, 80 * KIB) as offload:
        assert same(second(values, offload), second(values, nullcontext()))
        assert in_use(offload) == 0


class Echo(torch.autograd.Function):
    """Hands what it saved out as its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        kept = values * 3
        ctx.save_for_backward(kept)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return kept  # type: ignore[no-any-return]


def test_memory_that_was_handed_out_is_not_used_again_while_somebody_has_it() -> None:
    values = torch.randn(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            loss = Echo.apply(values).sum()
        (gradient,) = torch.autograd.grad(loss, values)
        del loss
        for _ in range(3):
            with offload:
                torch.zeros(1024, requires_grad=True).exp().sum().backward()
        assert torch.equal(gradient, values.detach() * 3)


def test_hooks_around_the_context_are_given_what_stays() -> None:
    seen: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.detach()

    layer = nn.Linear(32, 32)
    with offloaded(larger_than=KIB) as offload:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
            with offload:
                loss = layer(torch.randn(32, 32)).exp().sum(1).exp().sum()
        assert (32,) in seen and seen.count((32, 32)) <= 1, "the weight at most"
        loss.backward()


def test_inside_the_engine_its_own_hooks_keep_the_weights(tmp_path: Path) -> None:
    """A module that enters the context itself, in a model whose weights are in chunks."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with contexts[-1]:
                for layer in self.layers:
                    hidden = torch.tanh(layer(hidden))
            return hidden.square().mean()

    def losses() -> list[float]:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "patrickstar": {"memory": {"host": "120KiB", "disk": str(tmp_path)}},
        }
        engine, optimizer = patrickstar.initialize_engine(Inner, config)
        found = []
        for _ in range(4):
            loss = engine(torch.ones(16, 64))
            engine.backward(loss)
            optimizer.step()
            found.append(loss.item())
        engine.close()
        return found

    contexts: list[Any] = [nullcontext()]
    expected = losses()
    with offloaded(tmp_path, 64 * KIB) as offload:
        contexts.append(offload)
        assert losses() == expected
        assert offload.memory_report().tiers["host"].peak > 0


def test_checkpointed_regions_put_their_inputs_away() -> None:
    def region(values: torch.Tensor) -> torch.Tensor:
        return values.exp().sin().cos()

    values = torch.randn(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            hidden = values * 1.0
            for _ in range(4):
                hidden = checkpoint(region, hidden, use_reentrant=False)
            loss = hidden.sum()
        assert in_use(offload) == 4 * 4 * KIB
        loss.backward()
        found = values.grad.clone()
    values.grad = None
    region(region(region(region(values)))).sum().backward()
    assert torch.equal(found, values.grad)


def test_several_threads_may_train_at_once(tmp_path: Path) -> None:
    def train(number: int) -> None:
        values = torch.full((4096,), 0.1 * number, requires_grad=True)
        for _ in range(20):
            hidden = values
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                for _ in range(6):
                    hidden = hidden.sin().exp()
            hidden.sum().backward()
        found[number] = values.grad

    found: dict[int, torch.Tensor | None] = {}
    with offloaded(tmp_path, 100 * KIB) as offload:
        import functools

        hooks = functools.partial(offload._pack, None), offload._unpack
        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert in_use(offload) == 0
        for number in range(4):
            values = torch.full((4096,), 0.1 * number, requires_grad=True)
            for _ in range(20):
                hidden = values
                for _ in range(6):
                    hidden = hidden.sin().exp()
                hidden.sum().backward()
            assert torch.equal(found[number], values.grad), number  # type: ignore[arg-type]


def test_batches_of_ever_new_shapes_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_MOST_FREE", 8)
    with offloaded(tmp_path, 4 << 20) as offload:
        offload._look_through_at = 8
        for size in range(1024, 1024 * 40, 1024):
            values = torch.randn(size, requires_grad=True)
            with offload:
                loss = values.exp().sum()
            loss.backward()
        del loss, values
        assert in_use(offload) == 0
        assert len(offload._store._manager._chunks) <= 9


def test_storages_that_are_gone_are_forgotten() -> None:
    with offloaded() as offload:
        alive = []
        for _ in range(1000):
            values = torch.randn(1024, requires_grad=True)
            alive = [*alive[-20:], torch.empty(1024)]  # so that addresses differ
            with offload:
                values.exp().sum()
        assert len(offload._sources) <= 256


def test_tensors_of_a_device_come_back_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_CHUNK_MEMORY", "elsewhere")
    with offloaded() as offload:
        assert same(gradients(gpt(), run_gpt, offload), gradients(gpt(), run_gpt))
        assert in_use(offload) == 0


def test_a_backward_after_closing_says_so() -> None:
    values = torch.randn(1024, requires_grad=True)
    with offloaded() as offload:
        with offload:
            loss = values.exp().sum()
    with pytest.raises(ChunkStateError, match="run backward passes before closing"):
        loss.backward()


@pytest.mark.parametrize("memory", [{"hots": "1GiB"}, {"host": "many"}])
def test_a_wrong_budget_is_told(memory: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"hots|many"):
        patrickstar.offload_activations(memory=memory)
