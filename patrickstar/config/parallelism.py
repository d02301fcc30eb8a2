"""Parallelism other than over data: pipeline, tensor, expert and sequence.

PatrickStar shards parameters over data-parallel ranks. What would split the model itself is
refused, since the batch would mean another. What another library has split (DTensors) is trained in
parts, see `engine.split`.
"""

from __future__ import annotations

from typing import Any

from patrickstar.config.key import UNSET, Key, Status, accepted, rejected, within
from patrickstar.config.types import Bool, Float, Int, Str

_TENSOR = (
    "split the model with `torch.distributed.tensor.parallel` in the provider, and pass "
    "`communicator=Communicator.from_mesh(mesh, shard='data')` to `initialize_engine`"
)
_EXPERT = f"leave it out; or {_TENSOR}"
_PIPELINE = "there is no pipeline engine here"

OTHER_KEYS: tuple[Key, ...] = (
    rejected(
        "sequence_parallel_size",
        Int,
        UNSET,
        "ranks that share a sequence",
        "leave it out; activations that do not fit can go to host or disk",
        harmless=(1,),
    ),
    accepted(
        "data_parallel_size",
        Int,
        UNSET,
        "data-parallel ranks, with sequence_parallel_size",
        "all ranks of the launcher are data-parallel",
    ),
    accepted(
        "use_data_before_expert_parallelism",
        Bool,
        False,
        "order of data and expert ranks",
        "there is no expert parallelism here",
    ),
    *within(
        Key("pipeline", Status.ACCEPTED, UNSET, "pipeline parallelism", _PIPELINE),
        (
            accepted("stages", Any, "auto", "number of stages"),
            accepted("partition", Str, "best", "how layers are divided"),
            accepted("seed_layers", Bool, False, "seed each layer"),
            accepted("activation_checkpoint_interval", Int, 0, "layers between checkpoints"),
            accepted("pipe_partitioned", Bool, True, "shard activations that are sent"),
            accepted("grad_partitioned", Bool, True, "shard gradients that are sent"),
            accepted("use_reentrant", Bool, UNSET, "reentrant checkpoints"),
        ),
    ),
    *within(
        Key("tensor_parallel", Status.ACCEPTED, UNSET, "tensor parallelism", _TENSOR),
        (
            rejected("autotp_size", Int, 0, "ranks that share a layer", _TENSOR, harmless=(0, 1)),
            accepted("dtype", Any, "fp16", "dtype of the model"),
            accepted("tp_overlap_comm", Bool, False, "overlap communication"),
            accepted("vocab_parallel_lm_head", Bool | None, None, "split the output layer"),
            accepted("vocab_parallel_ce_backend", Str, "torch", "cross entropy: torch or liger"),
            *(
                key
                for name in ("tensor_parallel", "tp")
                for key in (
                    Key(name, Status.ACCEPTED, {}, "how layers are split", section=True),
                    rejected(
                        f"{name}.tp_size",
                        Int,
                        1,
                        "ranks that share a layer",
                        _TENSOR,
                        harmless=(1,),
                    ),
                    accepted(f"{name}.tp_grain_size", Int, 1, "granularity", harmless=(1,)),
                    accepted(f"{name}.mpu", Any, None, "object with process groups"),
                    accepted(f"{name}.tp_group", Any, None, "process group"),
                )
            ),
            accepted("injection_policy_tuple", Any, None, "layers to split"),
            accepted("partition_config", dict[str, Any] | None, None, "rules to split layers"),
            accepted("preset_model", Str | None, None, "rules of a known model"),
            accepted("keep_module_on_host", Bool, False, "load weights on the host"),
            accepted("replace_with_kernel_inject", Bool, False, "use inference kernels"),
            accepted("kernel_inject", Bool, False, "use inference kernels"),
        ),
    ),
    *within(
        Key(
            "expert_parallel",
            Status.REJECTED,
            {},
            "expert parallelism (AutoEP)",
            _EXPERT,
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "spread experts over ranks"),
            accepted("autoep_size", Int, 1, "ranks that share the experts"),
            accepted("expert_tensor_parallel_size", Int, 1, "ranks that share an expert"),
            accepted("validate_folding_routing", Bool, False, "check the routing"),
            accepted("async_split_plan", Bool, False, "plan splits asynchronously"),
            accepted("preset_model", Str | None, None, "patterns of a known model"),
            accepted("moe_layer_pattern", Str | None, None, "names of layers"),
            accepted("expert_pattern", Str | None, None, "names of experts"),
            accepted("router_pattern", Str | None, None, "names of routers"),
            accepted("use_grouped_mm", Bool, True, "multiply all experts at once"),
            accepted("disable_triton_grouped_mm", Bool, False, "not with Triton"),
            accepted("route_norm", Bool | None, None, "normalise routing weights"),
            accepted("route_scale", Float, 1.0, "scale routing weights"),
            accepted("score_apply", Str, "auto", "scores before or after experts"),
            accepted("combine_impl", Str, "auto", "how outputs are combined"),
            accepted("row_weighting_impl", Str, "auto", "how rows are weighted"),
            accepted("gate_up_impl", Str, "separate", "gate and up projection"),
            accepted("comm_backend", Str, "comm", "comm or deepep"),
            accepted("comm_num_sm", Int, 12, "multiprocessors for communication"),
            accepted("comm_qp_margin", Int, 4, "spare queue pairs"),
            accepted("comm_max_tokens_per_rank", Int, 0, "most tokens per rank"),
            accepted("num_expert_groups", Int | None, None, "groups of experts"),
            accepted("num_limited_groups", Int | None, None, "groups a token may use"),
            accepted("score_func", Str, "auto", "softmax or sigmoid"),
            accepted("top_k", Int | Str, "auto", "experts per token"),
            accepted("load_balance_coeff", Float | None, None, "weight of the balance loss"),
            accepted("routed_scaling_factor", Float | Str, "auto", "scale of routed outputs"),
            accepted("expert_w1", Str | None, None, "name of the first weight"),
            accepted("expert_w2", Str | None, None, "name of the second weight"),
            accepted("expert_w3", Str | None, UNSET, "name of the third weight"),
            accepted("num_experts_attr", Str | None, None, "attribute with their number"),
            accepted("top_k_attr", Str | None, None, "attribute with top_k"),
            accepted("has_shared_experts", Bool | None, None, "some experts see all tokens"),
            accepted("shared_experts_pattern", Str | None, None, "names of those"),
            accepted("shared_experts_gate_pattern", Str | None, None, "names of their gates"),
            accepted("expert_activation", Str | None, None, "their activation function"),
        ),
    ),
)
