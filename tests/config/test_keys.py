"""The table, and what is said about keys that are not in it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from patrickstar.config import ConfigWarning, load_config
from patrickstar.config.key import Status
from patrickstar.config.keys import TABLE
from patrickstar.errors import ConfigError


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        load_config(config)
    return str(raised.value)


@pytest.mark.parametrize(
    "config, right",
    [
        ({"train_batch_sise": 8}, "train_batch_size"),
        ({"train_microbatch_size": 8}, "train_micro_batch_size_per_gpu"),
        ({"Gradient_Clipping": 1.0}, "gradient_clipping"),
        ({"fp16": {"enable": True}}, "fp16.enabled"),
        ({"zero_optimisation": {"stage": 1}}, "zero_optimization"),
        ({"zero_optimization": {"ovelap_comm": True}}, "zero_optimization.overlap_comm"),
        (
            {"zero_optimization": {"offload_param": {"nvme_pat": "/x"}}},
            "zero_optimization.offload_param.nvme_path",
        ),
        ({"patrickstar": {"memory": {"hst": "1GiB"}}}, "patrickstar.memory.host"),
        ({"patrickstar": {"memory": {"disk": {"pth": "/x"}}}}, "patrickstar.memory.disk.path"),
        ({"aio": {"blok_size": 1}}, "aio.block_size"),
        ({"optimizer": {"tipe": "Adam"}}, "optimizer.type"),
    ],
)
def test_a_misspelt_key_names_the_nearest_right_one(config: dict[str, Any], right: str) -> None:
    assert f"did you mean {right!r}?" in refusal(config)


def test_a_key_at_the_wrong_level_says_where_it_belongs() -> None:
    assert "'patrickstar.memory'" in refusal({"memory": {"host": "1GiB"}})
    assert "'zero_optimization.stage'" in refusal({"stage": 3})


def test_a_key_that_is_like_no_other_lists_what_there_is() -> None:
    message = refusal({"patrickstar": {"memory": {"quux": 1}}})
    assert all(name in message for name in ("device", "host", "disk"))


def test_a_suggestion_is_never_an_old_name() -> None:
    assert "default_chunk_size" not in refusal({"chunk_size": 1000})


def test_every_mistake_is_told_at_once() -> None:
    message = refusal({"fp16": {"enable": True}, "gradient_cliping": 1, "nebula": {"a": 1}})
    assert all(name in message for name in ("fp16.enabled", "gradient_clipping", "nebula"))


def test_every_key_without_effect_says_why_and_every_refused_one_what_else() -> None:
    for key in TABLE.values():
        if key.status is Status.HONOURED:
            continue
        above = [key]
        while not above[-1].note and above[-1].parent:
            above.append(TABLE[above[-1].parent])
        assert above[-1].note or key.path.startswith("client"), key.path


def test_every_section_a_key_is_in_is_in_the_table_as_one() -> None:
    for key in TABLE.values():
        assert not key.parent or TABLE[key.parent].section, key.path


def test_every_key_has_a_meaning_of_one_line() -> None:
    for key in TABLE.values():
        assert key.meaning, key.path
        assert "\n" not in key.meaning + key.note
        assert "|" not in key.meaning + key.note  # it stands in a table of Markdown


def test_all_remarks_are_one_warning_and_a_clean_config_has_none() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config({"dump_state": True, "zero_optimization": {"contiguous_gradients": True}})
        load_config({"train_batch_size": 8, "bf16": {"enabled": True}})
    [warning] = caught
    assert warning.category is ConfigWarning
    assert "dump_state: " in str(warning.message)
    assert "zero_optimization.contiguous_gradients: " in str(warning.message)


def test_what_deepspeeds_default_asks_for_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config(
            {
                "dump_state": False,
                "gradient_allreduce_op": "mean",
                "comms_logger": {"enabled": False, "verbose": True},
                "hybrid_engine": {"enabled": False},
                "elasticity": {"enabled": False},
                "tensor_parallel": {"autotp_size": 1},
            }
        )


def test_a_config_for_nvme_as_in_the_documentation_of_transformers_loads() -> None:
    config = {
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
    }
    with pytest.warns(ConfigWarning, match=r"aio: \S+"):
        assert load_config(config).patrickstar.memory.disk is not None


def test_a_template_for_the_hugging_face_trainer_loads_as_it_is() -> None:
    template = {
        "fp16": {
            "enabled": "auto",
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    with pytest.warns(ConfigWarning, match=r"zero_optimization\.contiguous_gradients"):
        config = load_config(template)
    assert config.optimizer is not None
    assert config.optimizer.params == {}
    assert config.scheduler is not None
    assert config.scheduler.params == {}
    assert (config.precision, config.gradient_clipping, config.zero_optimization.stage) == (
        "fp32",
        1.0,
        3,
    )
