"""The names that DeepSpeed's scripts use, where DeepSpeed has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import patrickstar
from patrickstar.engine import zero_estimates
from patrickstar.ops.adagrad import DeepSpeedCPUAdagrad
from patrickstar.ops.adam import DeepSpeedCPUAdam, FusedAdam
from patrickstar.ops.lamb import FusedLamb
from patrickstar.ops.lion import DeepSpeedCPULion, FusedLion
from patrickstar.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)

from .optim.deepspeed_oracle import deepspeed_module

NAMES = """
DeepSpeedEngine add_config_arguments init_distributed initialize get_accelerator log_dist logger
zero.Init zero.GatheredParameters zero.register_external_parameter
utils.safe_get_full_fp32_param utils.safe_get_full_grad utils.safe_get_full_optimizer_state
utils.safe_set_full_fp32_param utils.safe_set_full_grad utils.safe_set_full_optimizer_state
utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state
utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state
utils.safe_update_full_grad_vectorized utils.set_z3_leaf_modules utils.RepeatingLoader
utils.logger utils.log_dist
comm.get_rank comm.get_world_size comm.get_local_rank comm.barrier comm.all_reduce comm.broadcast
comm.is_initialized comm.all_gather comm.ReduceOp comm.new_group comm.destroy_process_group
accelerator.get_accelerator checkpointing.checkpoint checkpointing.configure
checkpointing.is_configured ops.adam.DeepSpeedCPUAdam ops.adam.FusedAdam ops.lamb.FusedLamb
ops.lion.FusedLion ops.lion.DeepSpeedCPULion ops.adagrad.DeepSpeedCPUAdagrad
""".split()

ENGINE = """
backward step eval train zero_grad module module_state_dict load_module_state_dict save_checkpoint
load_checkpoint save_16bit_model get_lr get_mom get_global_grad_norm global_steps micro_steps
global_samples skipped_steps train_batch_size train_micro_batch_size_per_gpu
gradient_accumulation_steps gradient_clipping is_gradient_accumulation_boundary
set_gradient_accumulation_boundary was_step_applied no_sync zero_optimization
zero_optimization_stage zero_optimization_partition_weights zero_optimization_partition_gradients
fp16_enabled bfloat16_enabled dynamic_loss_scale device local_rank global_rank world_size
optimizer lr_scheduler training_dataloader steps_per_print wall_clock_breakdown get_batch_info
compile destroy scale
""".split()


def found(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_deepspeed_has_it(name: str) -> None:
    assert found(patrickstar, name) is not None


def test_the_names_above_are_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed = deepspeed_module("ops", monkeypatch) and sys.modules["deepspeed"]
    for name in [*NAMES, *(f"DeepSpeedEngine.{n}" for n in ENGINE)]:
        if name.split(".")[-1] in INSTANCE:
            continue
        assert found(deepspeed, name) is not None


# Set by DeepSpeed in `__init__`, so not to be found on the class.
INSTANCE = set(
    "module global_steps micro_steps global_samples skipped_steps device local_rank global_rank "
    "world_size optimizer lr_scheduler training_dataloader".split()
)


def test_the_engine_has_deepspeeds_names() -> None:
    engine, *_ = patrickstar.initialize(model=nn.Linear(2, 2), config={})
    assert isinstance(engine, patrickstar.DeepSpeedEngine)
    assert [name for name in ENGINE if not hasattr(engine, name)] == []
    assert engine.get_batch_info() == (1, 1, 1)
    engine.destroy()


def test_what_has_no_counterpart_says_what_to_do() -> None:
    with pytest.raises(AttributeError, match="pipeline parallelism"):
        _ = patrickstar.PipelineModule


def test_tied_weights_come_out_under_all_their_names(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    module[1].weight = module[0].weight
    engine, *_ = patrickstar.initialize(model=module, config={})
    engine.save_checkpoint(tmp_path)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)).load_state_dict(weights)
    assert weights["1.weight"] is weights["0.weight"]
    engine.close()


def test_frozen_weights_can_be_left_out_of_the_state_dict() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[0].requires_grad_(False)
    engine, *_ = patrickstar.initialize(model=module, config={})
    assert list(engine.module_state_dict(exclude_frozen_parameters=True)) == ["1.weight", "1.bias"]
    engine.close()


@pytest.mark.parametrize("numbers", [(1, 1), (8, 4)])
def test_the_memory_estimators_print_what_deepspeeds_print(
    numbers: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    three = deepspeed_module("runtime.zero.stage3", monkeypatch)
    two = deepspeed_module("runtime.zero.stage_1_and_2", monkeypatch)
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    capsys.readouterr()
    two.estimate_zero2_model_states_mem_needs_all_live(model, *numbers)
    three.estimate_zero3_model_states_mem_needs_all_live(model, *numbers)
    theirs = capsys.readouterr().out
    zero_estimates.print_zero2_live(model, *numbers)
    zero_estimates.print_zero3_live(model, *numbers)
    # From Python 3.11 on DeepSpeed prints the name of its enumeration there.
    assert capsys.readouterr().out == theirs.replace("OffloadDeviceEnum.cpu", "cpu ")


@pytest.mark.parametrize("offload", [(True, True), (True, False), (False, False)])
def test_the_memory_formulas_are_deepspeeds(
    offload: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    three = deepspeed_module("runtime.zero.stage3", monkeypatch)
    two = deepspeed_module("runtime.zero.stage_1_and_2", monkeypatch)
    for init in (True, False):
        given = (123_456_789, 1_234_567, 8, 3, *offload, init, 1.25)
        assert zero_estimates.estimate_zero3(*given) == (
            three.estimate_zero3_model_states_mem_needs(*given)
        )
    given2 = (123_456_789, 8, 3, offload[0], 1.25)
    assert zero_estimates.estimate_zero2(*given2) == (
        two.estimate_zero2_model_states_mem_needs(*given2)
    )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def losses(run: Any, step: Any, backward: Any) -> list[float]:
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(4):
        loss = run(torch.randn(4, 8, generator=generator)).square().mean()
        backward(loss)
        step()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1),
        lambda p: DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1, adamw_mode=False),
        lambda p: FusedAdam(p, lr=1e-2, bias_correction=False),
        lambda p: FusedLion(p, lr=1e-3, weight_decay=0.1),
        lambda p: DeepSpeedCPULion(p, lr=1e-3),
        lambda p: FusedLamb(p, lr=1e-2),
        lambda p: DeepSpeedCPUAdagrad(p, lr=1e-2),
    ],
)
def test_deepspeeds_optimizers_give_the_engine_the_numbers_they_have_alone(make: Any) -> None:
    module, alone = network(), network()
    config = {"train_batch_size": 4, "gradient_clipping": 0}
    engine, *_ = patrickstar.initialize(
        model=module, optimizer=make(module.parameters()), config=config
    )
    optimizer = make(alone.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = losses(alone, step, lambda loss: loss.backward())
    assert losses(engine, engine.step, engine.backward) == pytest.approx(expected, rel=1e-6)
    assert expected[0] != expected[-1]
    engine.close()


def test_adam_with_adamw_mode_is_pytorchs_adamw() -> None:
    ours, theirs = network(), network()
    a = DeepSpeedCPUAdam(ours.parameters(), lr=1e-2, weight_decay=0.1)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for module, optimizer in ((ours, a), (theirs, b)):
        module(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(x, y)


def test_pytorchs_adam_with_decoupled_decay_is_adamw() -> None:
    module, plain = network(), network()
    make = {"lr": 1e-2, "weight_decay": 0.5, "decoupled_weight_decay": True}
    config = {"train_batch_size": 4, "gradient_clipping": 0}
    engine, *_ = patrickstar.initialize(
        model=module, optimizer=torch.optim.Adam(module.parameters(), **make), config=config
    )
    optimizer = torch.optim.Adam(plain.parameters(), **make)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = losses(plain, step, lambda loss: loss.backward())
    assert losses(engine, engine.step, engine.backward) == pytest.approx(expected, rel=1e-6)
    engine.close()


def test_fp32_weights_come_out_of_a_checkpoint(tmp_path: Path) -> None:
    module = network()
    module.register_buffer("table", torch.arange(3))
    engine, *_ = patrickstar.initialize(model=module, config={"bf16": {"enabled": True}})
    losses(lambda x: engine(x).float(), engine.step, engine.backward)
    engine.save_checkpoint(tmp_path)
    expected = patrickstar.utils.safe_get_full_fp32_param(module[0].weight)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert expected is not None and torch.equal(weights["0.weight"], expected)
    assert weights["table"].tolist() == [0, 1, 2]
    fresh = load_state_dict_from_zero_checkpoint(network(), tmp_path)
    assert torch.equal(fresh[0].weight, expected)
    engine.close()


def test_frozen_weights_can_be_left_out_of_the_fp32_weights(tmp_path: Path) -> None:
    module = network()
    module[0].requires_grad_(False)
    engine, *_ = patrickstar.initialize(model=module, config={})
    losses(engine, engine.step, engine.backward)
    engine.save_checkpoint(tmp_path)
    given = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert sorted(given) == ["2.bias", "2.weight"]
    engine.close()


def test_a_process_alone_is_a_group_of_one() -> None:
    comm = patrickstar.comm
    tensor, gathered, objects = torch.ones(2), [torch.zeros(2)], [None]
    comm.all_reduce(tensor)
    comm.broadcast(tensor, 0)
    comm.all_gather(gathered, tensor)
    comm.all_gather_object(objects, "mine")
    comm.barrier()
    assert (comm.get_rank(), comm.get_world_size(), comm.is_initialized()) == (0, 1, False)
    assert tensor.tolist() == [1, 1] and gathered[0].tolist() == [1, 1] and objects == ["mine"]


def test_inputs_go_where_the_accelerator_says() -> None:
    accelerator = patrickstar.get_accelerator()
    engine, *_ = patrickstar.initialize(model=nn.Linear(2, 1), config={})
    x = torch.ones(1, 2).to(accelerator.device_name()).to(accelerator.current_device_name())
    assert engine(x).device == engine.device
    assert 0 < accelerator.memory_allocated() < accelerator.total_memory()
    engine.close()


def test_a_script_runs_unchanged_with_patrickstar_standing_for_deepspeed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "import deepspeed\n"
        "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "import deepspeed.comm as dist\n"
        "import patrickstar\n"
        "assert deepspeed is patrickstar and dist is patrickstar.comm\n"
        "assert deepspeed.__spec__.name == 'patrickstar'\n"
        "try:\n"
        "    import deepspeed.moe.layer\n"
        "except ImportError as error:\n"
        "    print(error, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "patrickstar.deepspeed", str(script), "--local_rank", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "PatrickStar has no counterpart of 'deepspeed.moe' ['--local_rank', '0']"
    )


def test_leaf_modules_are_marked_without_effect() -> None:
    module = network()
    assert patrickstar.utils.set_z3_leaf_modules(module, [nn.Linear]) == [module[0], module[2]]
    assert patrickstar.utils.get_z3_leaf_modules(module) == [module[0], module[2]]
    patrickstar.utils.unset_z3_leaf_modules(module, ["Linear"])
    assert patrickstar.utils.get_z3_leaf_modules(module) == []


def test_a_repeating_loader_begins_anew() -> None:
    loader = patrickstar.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_a_checkpointed_region_is_computed_again_and_has_the_same_gradients() -> None:
    module, plain, calls = network(), network(), []
    engine, *_ = patrickstar.initialize(model=module, config={"gradient_clipping": 0})
    patrickstar.checkpointing.configure(None, deepspeed_config={"train_batch_size": 1})
    assert patrickstar.checkpointing.is_configured()

    def region(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        calls.append(1)
        return module(x) * scale

    x = torch.ones(2, 8, requires_grad=True)
    engine.backward(patrickstar.checkpointing.checkpoint(region, x, scale=2.0).sum())
    (plain(torch.ones(2, 8)) * 2.0).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
    engine.close()
