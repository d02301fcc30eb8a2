"""Parts of DeepSpeed around training whose place other things take: aio, compile, autotuning."""

from __future__ import annotations

from typing import Any

from patrickstar.config.key import UNSET, Key, Status, accepted, rejected, within
from patrickstar.config.types import Bool, Int, Str

_COMPILE = "there is no DeepCompile here; use `torch.compile` on blocks of the model"

OTHER_KEYS: tuple[Key, ...] = (
    accepted(
        "zero_allow_untested_optimizer",
        Bool,
        False,
        "let ZeRO shard any optimizer",
        "every optimizer whose update is elementwise works, and others are refused",
    ),
    accepted(
        "zero_force_ds_cpu_optimizer",
        Bool,
        True,
        "insist on DeepSpeed's CPU Adam when offloading",
        "the update runs wherever its chunks are",
        harmless=(False,),
    ),
    *within(
        Key(
            "aio",
            Status.ACCEPTED,
            {},
            "how files of offloaded state are read and written",
            "the disk tier chooses its block size and threads by itself",
        ),
        (
            accepted("block_size", Int, 1048576, "bytes of a request"),
            accepted("queue_depth", Int, 8, "requests in flight"),
            accepted("intra_op_parallelism", Int, 1, "threads for one request"),
            accepted("thread_count", Int, UNSET, "its name in older DeepSpeed"),
            accepted("single_submit", Bool, False, "submit requests one by one"),
            accepted("overlap_events", Bool, True, "submit while others complete"),
            accepted("use_gds", Bool, False, "GPUDirect Storage"),
        ),
    ),
    *within(
        Key("compile", Status.ACCEPTED, UNSET, "DeepCompile", _COMPILE),
        (
            rejected("deepcompile", Bool, False, "turn DeepCompile on", _COMPILE),
            accepted("autoep_non_moe", Bool, False, "compile around AutoEP layers"),
            accepted("free_activation", Bool, False, "free activations early"),
            accepted("free_activation_threshold", Int, 10 * 1024**2, "bytes from which"),
            accepted("offload_activation", Bool, False, "move saved activations to the host"),
            accepted("offload_activation_pin_memory", Bool, True, "into pinned memory"),
            accepted("offload_opt_states", Bool, False, "move optimizer states to the host"),
            accepted("double_buffer", Bool, True, "use two buffers"),
            accepted("symmetric_memory", Bool, False, "use symmetric memory"),
            accepted("debug_log", Bool, False, "dump graphs"),
            accepted("offload_parameters", Bool, False, "move parameters to the host"),
            accepted("sync_before_reduce", Bool, False, "synchronise before reducing"),
            accepted("sync_after_reduce", Bool, False, "synchronise after reducing"),
            accepted("sync_before_allgather", Bool, False, "synchronise before gathering"),
            accepted("sync_after_allgather", Bool, False, "synchronise after gathering"),
            accepted("keep_int_input_tensors", Bool, True, "keep integer inputs"),
            accepted("keep_all_input_tensors", Bool, False, "keep all inputs"),
            accepted("passes", list[Str] | None, None, "passes to run"),
        ),
    ),
    *within(
        Key(
            "autotuning",
            Status.REJECTED,
            {},
            "search for the fastest settings",
            "`patrickstar plan` finds what fits and predicts its speed",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "search"),
            accepted("fast", Bool, True, "only micro-batch sizes"),
            accepted("results_dir", Str, "autotuning_results", "folder of results"),
            accepted("exps_dir", Str, "autotuning_exps", "folder of experiments"),
            accepted("overwrite", Bool, True, "overwrite them"),
            accepted("start_profile_step", Int, 3, "first step measured"),
            accepted("end_profile_step", Int, 5, "last step measured"),
            accepted("metric", Str, "throughput", "what is best: latency, throughput or flops"),
            accepted("metric_path", Str, None, "file of the metric"),
            accepted("tuner_type", Str, "gridsearch", "gridsearch, random or model_based"),
            accepted("tuner_early_stopping", Int, 5, "stop without progress after"),
            accepted("tuner_num_trials", Int, 50, "most trials"),
            accepted("arg_mappings", dict[str, Any] | None, None, "arguments of the script"),
            Key("model_info", Status.REJECTED, None, "the model", section=True),
            accepted("model_info.profile", Bool, False, "measure it"),
            accepted("model_info.num_params", Int, None, "its parameters"),
            accepted("model_info.hidden_size", Int, None, "its width"),
            accepted("model_info.num_layers", Int, None, "its depth"),
            accepted("model_info_path", Str, None, "file with model_info"),
            accepted("mp_size", Int, 1, "model-parallel ranks"),
            accepted("max_train_batch_size", Int, None, "largest batch"),
            accepted("min_train_batch_size", Int, 1, "smallest batch"),
            accepted("max_train_micro_batch_size_per_gpu", Int, 1024, "largest micro-batch"),
            accepted("min_train_micro_batch_size_per_gpu", Int, 1, "smallest micro-batch"),
            accepted("num_tuning_micro_batch_sizes", Int, 3, "micro-batch sizes to try"),
        ),
    ),
    *within(
        Key(
            "weight_quantization",
            Status.REJECTED,
            UNSET,
            "quantise weights for inference",
            "a model that is trained is not quantised; leave it out",
            switch=("enabled", True),
        ),
        (
            accepted("enabled", Bool, True, "quantise"),
            accepted("num_bits", Int, 8, "bits of a weight"),
            accepted("q_type", Str, "symmetric", "symmetric or asymmetric"),
            accepted("q_groups", Int, 1, "groups with one scale"),
            accepted("quantized_initialization", dict[str, Any], {}, "while the model is built"),
            accepted("post_init_quant", dict[str, Any], {}, "after it is built"),
        ),
    ),
    *within(
        Key(
            "hybrid_engine",
            Status.REJECTED,
            {},
            "generate text between training steps with inference kernels",
            "call the model's own `generate`, chunks are fetched as it runs",
            switch=("enabled", False),
        ),
        (
            accepted("enabled", Bool, False, "switch between training and inference"),
            accepted("max_out_tokens", Int, 512, "longest text"),
            accepted("inference_tp_size", Int, 1, "tensor-parallel ranks"),
            accepted("release_inference_cache", Bool, False, "free the cache afterwards"),
            accepted("pin_parameters", Bool, True, "keep parameters in place"),
            accepted("tp_gather_partition_size", Int, 8, "layers gathered at a time"),
            accepted("enable_cuda_graph", Bool, False, "decode with CUDA graphs"),
        ),
    ),
)
