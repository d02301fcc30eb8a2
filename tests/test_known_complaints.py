"""What users of DeepSpeed complain about, each built small from the report of it and tried here.

A test names the issue it comes from: in deepspeedai/DeepSpeed where nothing else is said.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar as deepspeed
from patrickstar.config import ConfigWarning
from patrickstar.memory.heap import give_back_free_pages
from patrickstar.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

MIB = 1 << 20
WIDTH = 24


def config(stage: int = 3, *, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "patrickstar": {"chunk_size": 1000},
        **more,
    }
    return made if precision == "fp32" else made | {precision: {"enabled": True}}


def rows(seed: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def begin(module: nn.Module, given: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=module, config=given)[0]


def train(engine: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        loss = engine(*batch) if isinstance(batch, tuple) else engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plainly(module: nn.Module, batches: Any, clipping: float = 1.0) -> list[float]:
    """The same in an ordinary loop; DeepSpeed clips at 1.0 unless it is told otherwise."""
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, fused=True)
    losses = []
    for batch in batches:
        loss = module(*batch) if isinstance(batch, tuple) else module(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in module.state_dict().items()}


def resident(what: str = "VmRSS") -> int:
    """Bytes of this process: now, or (VmHWM) the most since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) << 10
    raise AssertionError(what)


def forget_peak() -> int:
    """Bytes that the process has now, when everything that a run imports is there."""
    train(begin(nn.Linear(WIDTH, 1), config(patrickstar={})), [])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return resident()


# "ZeRO 0, 1, 2, 3 produce different results": #966, with accumulation #1488, 1 against 2 #1945.


class Tied(nn.Module):
    """The model of #966: the last layer is the first one, and one layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        last.weight, last.bias = first.weight, first.bias
        half = [nn.Linear(WIDTH // 2, WIDTH // 2) for _ in range(6)]
        self.mlp = nn.Sequential(
            first, nn.Linear(WIDTH, WIDTH // 2), *half, nn.Linear(WIDTH // 2, WIDTH), last
        )
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        classes = torch.arange(len(x)) % WIDTH
        return nn.functional.cross_entropy(self.mlp(x).float(), classes)


def every_stage(rank: int, size: int, precision: str) -> list[tuple[list[float], Any]]:
    found = []
    for stage in range(4):
        torch.manual_seed(0)
        given = config(stage, precision=precision, gradient_accumulation_steps=2)
        if precision == "fp16":
            given["fp16"]["initial_scale_power"] = 8
        engine = begin(Tied(), given)
        losses = train(engine, [rows(100 * step + rank) for step in range(6)])
        found.append((losses, weights(engine)))
        engine.close()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_stage_of_zero_has_the_same_losses(ranks, precision):
    for found in ranks.run(every_stage, 2, precision):
        expected, trained = found[0]
        assert expected[-1] < expected[0]
        for losses, other in found[1:]:
            assert losses == expected
            assert all(torch.equal(other[name], weight) for name, weight in trained.items())


# "More elements 524709888 than buffer size 100,000,000": #3506; "Not enough buffers": #3062.


class Reader(nn.Module):
    """Its embedding is larger than any buffer in the config."""

    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(words, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(x)).square().mean()


def test_a_parameter_larger_than_the_nvme_buffer_trains(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    given = config(
        zero_optimization={
            "stage": 3,
            "offload_param": {**nvme, "buffer_count": 1, "buffer_size": 1000, "max_in_cpu": 0},
            "offload_optimizer": {**nvme, "buffer_count": 1},
        },
        patrickstar={"memory": {"host": "1MiB"}, "chunk_size": 4096, "piece_size": 8192},
    )
    words = [torch.arange(step, 4096, 37) for step in range(3)]
    torch.manual_seed(0)
    plain = Reader()
    with pytest.warns(ConfigWarning, match="buffer_size"):
        engine = begin(copy.deepcopy(plain), given)
    assert train(engine, words) == pytest.approx(train_plainly(plain, words), rel=1e-6)
    report = engine.memory_report()
    assert report.tiers["disk"].peak > MIB  # 2 MiB of state
    assert report.tiers["host"].peak <= MIB
    engine.close()


# Frozen weights are random again after a resume: #3090; tied ones are missing: #3824, #1896.


class PartlyFrozen(nn.Module):
    """Two layers share a weight, as in #3824, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer0, self.layer1, self.layer2 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layer1.weight = self.layer2.weight
        self.layer0.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(torch.tanh(self.layer0(x)))).square().mean()


def save_and_resume(rank: int, size: int, stage: int, folder: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    engine = begin(PartlyFrozen(), config(stage, precision="bf16"))
    train(engine, [rows(rank), rows(rank + 2)])
    engine.save_checkpoint(folder)
    before = weights(engine)
    engine.close()
    torch.manual_seed(1)  # other weights, the frozen ones too
    engine = begin(PartlyFrozen(), config(stage, precision="bf16"))
    engine.load_checkpoint(folder)
    after = weights(engine)
    engine.close()
    return before, after


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_and_tied_weights_come_back_from_a_checkpoint(ranks, stage, tmp_path):
    torch.manual_seed(0)
    frozen = PartlyFrozen().layer0.weight.bfloat16()
    for before, after in ranks.run(save_and_resume, 2, stage, str(tmp_path)):
        assert before.keys() == after.keys() == PartlyFrozen().state_dict().keys()
        assert all(torch.equal(after[name], weight) for name, weight in before.items())
        assert torch.equal(after["layer0.weight"], frozen)
    fresh = PartlyFrozen()
    fresh.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(tmp_path))
    assert torch.equal(fresh.layer0.weight.bfloat16(), frozen)
    assert fresh.layer1.weight is fresh.layer2.weight
    assert torch.equal(fresh.layer1.weight.bfloat16(), before["layer1.weight"])


# "Apply Zero-3 and LoRA appears empty lora weight [0]": huggingface/peft #2500; `modules_to_save`
# are empty: huggingface/peft #2450.


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank, and a head that is trained in full."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = nn.Linear(WIDTH, 2, bias=False)
        self.lora_B = nn.Linear(2, WIDTH, bias=False)
        self.modules_to_save = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x) + self.lora_B(self.lora_A(x))
        return self.modules_to_save(x).square().mean()


def save_adapters(rank: int, size: int, folder: str) -> Any:
    """As adapters are saved: what the module itself has under their names, by the first rank."""
    torch.manual_seed(0)
    engine = begin(Adapted(), config(precision="bf16"))
    train(engine, [rows(rank), rows(rank + 2)])
    chosen = {
        name: weight
        for name, weight in engine.module.state_dict().items()
        if "lora" in name or "modules_to_save" in name
    }
    if rank == 0:
        torch.save(chosen, Path(folder) / "adapter_model.bin")
    found = weights(engine)
    engine.close()
    return found


def test_adapters_are_saved_with_their_weights_by_every_stage(ranks, tmp_path):
    expected, _ = ranks.run(save_adapters, 2, str(tmp_path))
    saved = torch.load(tmp_path / "adapter_model.bin", weights_only=True)
    assert {name: tuple(weight.shape) for name, weight in saved.items()} == {
        "lora_A.weight": (2, WIDTH),
        "lora_B.weight": (WIDTH, 2),
        "modules_to_save.weight": (WIDTH, WIDTH),
        "modules_to_save.bias": (WIDTH,),
    }
    assert all(torch.equal(weight, expected[name]) for name, weight in saved.items())


def test_peft_saves_adapters_that_it_loads_again(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra [hf]")
    low = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model = peft.get_peft_model(copy.deepcopy(base), low)
    memory = {"host": "128KiB", "disk": str(tmp_path / "spool")}
    engine = begin(model, config(patrickstar={"memory": memory, "chunk_size": 256}))
    for seed in range(3):
        engine.backward(engine(rows(seed)).square().mean())
        engine.step()
    engine.module.save_pretrained(tmp_path / "adapter")
    expected = engine(rows(9)).detach().clone()
    engine.close()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(again(rows(9)), expected)


# "'weight' must be 2-D": a copy as the reference model, huggingface/trl #361; a teacher that nobody
# initialized, arcee-ai/DistillKit #3; a text encoder beside the model, huggingface/transformers
# #22705; the module itself used after training, #2746.


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.embedding(x))


def distil(rank: int, size: int) -> dict[str, torch.Tensor]:
    """What each use of an embedding gives, beside what an ordinary module gives."""
    ids, given = torch.arange(6) + rank, config()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=given):
        teacher = Words().eval().requires_grad_(False)
    torch.manual_seed(0)
    student = Words()
    engine = begin(student, given)
    reference = copy.deepcopy(engine.module).requires_grad_(False)
    for _ in range(2):
        with torch.no_grad():
            taught = teacher(ids)
        engine.backward((engine(ids) - 2 * taught).square().mean())
        engine.step()
    with torch.no_grad():
        found = {
            "teacher": teacher(ids),
            "reference": reference(ids),
            "module": engine.module(ids),
            "engine": engine(ids),
        }
        found = {name: output.clone() for name, output in found.items()}
    engine.close()
    return found


def test_embeddings_that_the_engine_does_not_run_have_their_weights(ranks):
    torch.manual_seed(0)
    plain = Words()
    for rank, found in enumerate(ranks.run(distil, 2)):
        untrained = plain(torch.arange(6) + rank)
        assert torch.equal(found["teacher"], untrained)
        assert torch.equal(found["reference"], untrained)
        assert torch.equal(found["module"], found["engine"])
        assert not torch.equal(found["module"], untrained)


# "still have inflight params": a layer that the data choose, #5828; evaluation between two steps,
# #3068 and #5648.


class Chosen(nn.Module):
    """The model of #5828: `fc2` takes part for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc3 = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, use_fc2: bool) -> torch.Tensor:
        x = nn.functional.selu(self.fc1(x))
        if use_fc2:
            x = self.fc2(x)
        return self.fc3(nn.functional.selu(x)).square().mean()


WAYS = [True, True, False, False, True, False, True]


def take_ways(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    given = config(zero_optimization={"stage": 3, "overlap_comm": True})
    engine, losses = begin(Chosen(), given), []
    for step, way in enumerate(WAYS):
        losses += train(engine, [(rows(10 * step + rank), way)])
        engine.eval()
        with torch.no_grad():
            assert engine(rows(rank), not way).isfinite()
        engine.train()
    engine.close()
    return losses


def test_layers_that_the_data_choose_and_evaluations_between_steps_train_on(ranks):
    torch.manual_seed(0)
    module = Chosen()

    def both(step: int, way: bool) -> torch.Tensor:
        losses = [module(rows(10 * step + rank), way) for rank in range(2)]
        seen.append([loss.item() for loss in losses])
        return torch.stack(losses).mean()

    seen: list[list[float]] = []
    trained = list(module.parameters())
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0, fused=True)
    for step, way in enumerate(WAYS):
        both(step, way).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    answers = ranks.run(take_ways, 2)
    for rank, losses in enumerate(answers):
        assert losses == pytest.approx([pair[rank] for pair in seen], rel=1e-5)


# Memory stays after the engine is deleted, #5674, and grows with each new one, #7204 and #879.


def layers(count: int) -> nn.Module:
    """Layers of 4 MiB each in fp32."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))


def test_memory_is_free_after_the_engine_is_destroyed() -> None:
    def one() -> tuple[Any, Any, Any]:
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=layers(6),
            config=config(
                2,
                patrickstar={},
                scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
            ),
        )
        engine.backward(engine(torch.ones(1, 1024)).square().mean())
        engine.step()
        assert resident() - before > 90 * MIB  # 24 MiB of weights, 72 of gradients and moments
        engine.destroy()
        return weakref.ref(engine), optimizer, scheduler

    before = forget_peak()
    kept = [one() for _ in range(3)]  # a script still has its optimizer and its scheduler
    # An optimizer refers to the weights, which are ordinary ones now, as any of torch does.
    assert resident() - before < 3 * 24 * MIB + 8 * MIB
    gone = [engine for engine, *_ in kept]
    del kept
    gc.collect()
    assert [engine() for engine in gone] == [None] * 3
    give_back_free_pages()  # as with any tensors that are gone, the C library may keep their pages
    assert resident() - before < 8 * MIB


# A run that fits cannot be resumed: the file is loaded whole, huggingface/transformers #17258 and
# #3104, and by every rank, #1111.


def resume(rank: int, size: int, folder: str) -> tuple[int, int]:
    """How much a rank holds at most while it loads, and at most while it trains."""
    given = config(patrickstar={"chunk_size": MIB})

    def fresh() -> Any:
        torch.manual_seed(0)
        return begin(layers(12), given)

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(1, 1024)).square().mean())
        engine.step()

    engine = fresh()
    before = forget_peak()
    step(engine)
    training = resident("VmHWM") - before
    engine.save_checkpoint(folder)
    engine.close()
    del engine
    engine = fresh()
    before = forget_peak()
    engine.load_checkpoint(folder)
    loading = resident("VmHWM") - before
    engine.close()
    return loading, training


def test_resuming_takes_no_more_memory_than_training(ranks, tmp_path):
    for loading, training in ranks.run(resume, 2, str(tmp_path)):
        assert training > 44 * MIB  # its half of 96 MiB of moments, about
        assert loading < training + 4 * MIB
    assert sum(os.path.getsize(file) for file in tmp_path.rglob("*.safetensors")) > 140 * MIB


# Every rank loads the full model: #3722, #1814, #5617.


def build(rank: int, size: int, how: str) -> int:
    """How much a rank holds at most while it builds and trains its part of 96 MiB of weights."""
    given, before = config(patrickstar={"chunk_size": MIB}), forget_peak()
    if how == "provider":
        engine, _ = deepspeed.initialize_engine(_mostly_frozen, given)
    else:
        with deepspeed.zero.Init(
            config_dict_or_path=given if how == "Init with a config" else None
        ):
            module = _mostly_frozen()
        engine = begin(module, given)
    engine.backward(engine(torch.ones(1, 1024)).square().mean())
    engine.step()
    peak = resident("VmHWM") - before
    engine.close()
    return peak


def _mostly_frozen() -> nn.Module:
    """Hardly anything is trained, so that the weights are what takes memory."""
    module = layers(24)
    module[1:].requires_grad_(False)  # type: ignore[index]
    return module


@pytest.mark.parametrize("how", ["provider", "Init with a config", "Init without one"])
def test_no_rank_holds_the_full_model(ranks, how):
    for peak in ranks.run(build, 2, how):
        assert peak < 48 * MIB + 32 * MIB  # its half, and chunks of 4 MiB that come and go
