"""DeepSpeed's estimates of the memory that ZeRO 2 and 3 need for model states.

They say what a run would take under DeepSpeed, with its formulas (docs/memory in its repository):
bytes of parameters, gradients and Adam's states in 16-bit training, per process, without
activations. What a run takes here is asked of `patrickstar plan`, which rehearses the model itself.
"""

from __future__ import annotations

from torch import nn

_HEAD = (
    "Estimated memory needed for params, optim states and gradients for a:\n"
    "HW: Setup with {nodes} {node_word}, {gpus} {gpu_word} per node.\n"
    "SW: Model with {model}.\n"
    "  per CPU  |  per GPU |   Options"
)


def estimate_zero2(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of CPU memory per node and of memory per GPU under ZeRO 2."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    # 2 for the weights; 2 and 4 for gradients, 4 for masters and 8 for moments are sharded.
    gpu = 2 * total_params + int(18 * total_params / gpus)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


def estimate_zero3(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of CPU memory per node, of memory per GPU, and of the largest layer under ZeRO 3."""
    gpus, share = num_nodes * num_gpus_per_node, 1 / num_nodes
    layer = 4 * largest_layer_params
    if not cpu_offload:
        built = largest_layer_params if zero_init else total_params
        cpu = built * 4 * num_gpus_per_node * additional_buffer_factor
        return int(cpu), layer + int(18 * total_params / gpus), layer
    each = 18 if cpu_offload_params else 16
    gpu = layer if cpu_offload_params else layer + int(2 * total_params / gpus)
    if zero_init:
        cpu = total_params * each * share * additional_buffer_factor
    else:
        cpu = total_params * max(4 * num_gpus_per_node, each * share) * additional_buffer_factor
    return int(cpu), gpu, layer


def print_zero2_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print `estimate_zero2` of `model`, with and without offload."""
    print_zero2_cold(_total(model), num_gpus_per_node, num_nodes, additional_buffer_factor)


def print_zero2_cold(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same of a model that is not there, by its number of parameters."""
    _print_head(num_nodes, num_gpus_per_node, f"{int(total_params / 1e6)}M total params")
    for offload in (True, False):
        cpu, gpu = estimate_zero2(
            total_params, num_gpus_per_node, num_nodes, offload, additional_buffer_factor
        )
        _print_row(cpu, gpu, f"offload_optimizer={_device(offload)}")


def print_zero3_live(
    model: nn.Module,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print `estimate_zero3` of `model` for every combination of its switches."""
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    print_zero3_cold(_total(model), largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def print_zero3_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same of a model that is not there, by its parameters and those of its largest layer."""
    model = (
        f"{int(total_params / 1e6)}M total params, "
        f"{int(largest_layer_params / 1e6)}M largest layer params"
    )
    _print_head(num_nodes, num_gpus_per_node, model)
    for offload, offload_params in ((True, True), (True, False), (False, False)):
        for init in (True, False):
            cpu, gpu, _ = estimate_zero3(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                offload,
                offload_params,
                init,
                additional_buffer_factor,
            )
            options = (
                f"offload_param={_device(offload_params)}, "
                f"offload_optimizer={_device(offload)}, zero_init={int(init)}"
            )
            _print_row(cpu, gpu, options)


def _total(model: nn.Module) -> int:
    """Parameters, tied ones once."""
    return sum(p.numel() for p in model.parameters())


def _device(offload: bool) -> str:
    return "cpu " if offload else "none"


def _print_head(nodes: int, gpus: int, model: str) -> None:
    node_word, gpu_word = "nodes" if nodes > 1 else "node", "GPUs" if gpus > 1 else "GPU"
    print(_HEAD.format(nodes=nodes, node_word=node_word, gpus=gpus, gpu_word=gpu_word, model=model))


def _print_row(cpu: int, gpu: int, options: str) -> None:
    print(f" {cpu / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {options}")
