"""Rules between the options of training and the model, the devices and the algorithm. See the package."""

import importlib.util
from collections.abc import Iterator
from dataclasses import fields

from rlframe.megatron.config.options import (
    MODULES_OF_EXPERTS,
    Attention,
    Dispatcher,
    Fp8Recipe,
    KernelConfig,
    MoeConfig,
    Recompute,
    RecomputeMethod,
)
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.models.families.base import Architecture


def device_faults(train: TrainConfig, *, cuda: bool) -> Iterator[str]:
    """Options that need a CUDA device, where there is none."""
    if cuda:
        if train.kernels.attention is Attention.FLASH and importlib.util.find_spec("flash_attn") is None:
            yield "train.kernels.attention=flash needs the package flash-attn; install it, or use auto"
        return
    needing = {
        "train.fp8.recipe": (train.fp8.recipe, Fp8Recipe.OFF),
        "train.optimizer.precision_aware": (train.optimizer.precision_aware, False),
        "train.optimizer.cpu_offload_fraction": (train.optimizer.cpu_offload_fraction, 0.0),
    }
    for key, (value, off) in needing.items():
        if value != off:
            yield f"{key} needs CUDA and Transformer Engine, got {_text(value)} on a CPU; remove it"
    defaults = KernelConfig()
    for field in fields(KernelConfig):
        value = getattr(train.kernels, field.name)
        if value != getattr(defaults, field.name):
            yield f"train.kernels.{field.name} has no effect on a CPU, got {_text(value)}; remove it"
    if "moe_act" in train.recompute_options.modules:
        yield "train.recompute_options.modules: moe_act needs grouped experts, which need CUDA; use moe or mlp"


def model_faults(train: TrainConfig, architecture: Architecture) -> Iterator[str]:
    """Options that the model has no use for, or that do not fit its sizes."""
    parallel = Parallel.parse(train.parallel)
    if not architecture.num_experts:
        yield from _dense_faults(train, architecture)
    elif train.moe.bias_update_rate and not architecture.sigmoid_router:
        yield (
            f"train.moe.bias_update_rate has no effect on {architecture.model_type}, whose router has no bias, got "
            f"{train.moe.bias_update_rate}; remove it"
        )
    if train.recompute is Recompute.FULL:
        yield from _recompute_faults(train, parallel, architecture)
    if train.fp8.recipe is not Fp8Recipe.OFF:
        multiple = train.fp8.token_multiple
        sizes = {"hidden_size": architecture.hidden_size}
        if not all(architecture.moe_layers):
            sizes["ffn_hidden_size / tp"] = architecture.ffn_hidden_size // parallel.tp
        if architecture.num_experts:
            sizes["expert_ffn_hidden_size / etp"] = architecture.expert_ffn_hidden_size // parallel.etp
        for name, size in sizes.items():
            if size % multiple:
                yield (
                    f"train.fp8.recipe={train.fp8.recipe} needs {name} to be a multiple of {multiple}, got {size} of "
                    f"{architecture.model_type}; use another recipe or layout, or off"
                )


def _dense_faults(train: TrainConfig, architecture: Architecture) -> Iterator[str]:
    defaults = MoeConfig()
    for field in fields(MoeConfig):
        value = getattr(train.moe, field.name)
        if value != getattr(defaults, field.name):
            yield (
                f"train.moe.{field.name} has no effect on {architecture.model_type}, which is dense, got "
                f"{_text(value)}; remove it"
            )
    for key in ("cutlass_experts", "permute_fusion"):
        if not getattr(train.kernels, key):
            yield (
                f"train.kernels.{key} has no effect on {architecture.model_type}, which is dense, got false; remove it"
            )
    if modules := sorted(MODULES_OF_EXPERTS & set(train.recompute_options.modules)):
        yield (
            f"train.recompute_options.modules: {', '.join(modules)} has no effect on {architecture.model_type}, which "
            "is dense; use mlp"
        )


def _recompute_faults(train: TrainConfig, parallel: Parallel, architecture: Architecture) -> Iterator[str]:
    layers, stage = train.recompute_options.layers, -(-architecture.num_layers // parallel.pp)
    if layers > stage:
        yield (
            f"train.recompute_options.layers must be at most the {stage} layers of a pipeline stage of "
            f"{architecture.model_type}, got {layers}"
        )
    elif train.recompute_options.method is RecomputeMethod.UNIFORM and stage % layers:
        yield (
            f"train.recompute_options.layers must divide the {stage} layers of a pipeline stage with method=uniform, "
            f"got {layers}; or use method=block"
        )


def expert_faults(train: TrainConfig, *, online: bool) -> Iterator[str]:
    """Rules of mixture-of-experts layers that the model's sizes have no part in."""
    moe, parallel = train.moe, Parallel.parse(train.parallel)
    if moe.capacity_factor is not None and online and not moe.allow_token_drop:
        yield (
            f"train.moe.capacity_factor must be null with an online algorithm, got {moe.capacity_factor}: the engine "
            "drops no token, so the trainer would not have the sampled text's logprobs; train.moe.allow_token_drop="
            "true accepts that"
        )
    if moe.dispatcher is Dispatcher.ALLGATHER and parallel.pp > 1:
        yield (
            f"train.moe.dispatcher=allgather cannot work with pipeline stages (p{parallel.pp}), whose packed "
            "micro-batches differ in length; use alltoall"
        )
    elif moe.dispatcher is Dispatcher.ALLGATHER and parallel.tp % (parallel.etp * parallel.ep):
        # Megatron-Core 0.16.1 gathers as if all were equal, and overruns its buffer where they are not.
        yield (
            f"train.moe.dispatcher=allgather needs ranks with equally many tokens, so experts spread over the tensor-"
            f"parallel ranks of one micro-batch: etp * ep = {parallel.etp * parallel.ep} must divide tp = "
            f"{parallel.tp} in train.parallel={train.parallel}; use alltoall"
        )
    if moe.dispatcher is Dispatcher.ALLGATHER and train.fp8.recipe is not Fp8Recipe.OFF:
        yield f"train.moe.dispatcher=allgather cannot pad experts' tokens for train.fp8.recipe={train.fp8.recipe}"
    if moe.dispatcher is Dispatcher.FLEX and importlib.util.find_spec("deep_ep") is None:
        yield "train.moe.dispatcher=flex needs the package deep_ep (DeepEP), which is not installed; use alltoall"


def adapter_faults(train: TrainConfig) -> Iterator[str]:
    """What has no part in training adapters, or cannot have."""
    if train.lora is None:
        return
    if train.moe.freeze_router:
        yield "train.moe.freeze_router has no effect with train.lora, which trains no router, got true; remove it"
    if train.fp8.recipe is not Fp8Recipe.OFF:
        # Adapters are plain products in train.dtype, and how far the two together are from the merged weights in the
        # engines has not been measured.
        yield (
            f"train.fp8.recipe={train.fp8.recipe} is not supported with train.lora: adapters beside modules that "
            "compute in FP8 are untested; use fp8.recipe=off, or train without lora"
        )


def sleep_faults(train: TrainConfig, *, online: bool, shared: bool) -> Iterator[str]:
    """A policy that has its devices to itself has no reason to sleep."""
    if train.offload_optimizer and not (online and shared):
        why = "cluster.colocate=false" if online else "an algorithm that samples nothing"
        yield f"train.offload_optimizer has no effect with {why}, got true; remove it"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
