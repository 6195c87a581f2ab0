"""Rules across the options of training and the model, the devices and the algorithm. See the package."""

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
from rlframe.models.stages import chunk_layers
from rlframe.utils.faults import Fault, shown

MTP = "train.mtp.mode"


def device_faults(train: TrainConfig, *, cuda: bool) -> Iterator[Fault]:
    """Rejects options that need a CUDA device on a machine without one."""
    if cuda:
        if train.kernels.attention is Attention.FLASH and importlib.util.find_spec("flash_attn") is None:
            yield Fault(
                "train.kernels.attention",
                "needs the package flash-attn",
                got="flash",
                hint="install it, or use auto",
                stated=True,
            )
        return
    needing = {
        "train.fp8.recipe": (train.fp8.recipe, Fp8Recipe.OFF),
        "train.offload_activations": (train.offload_activations, False),
        "train.optimizer.precision_aware": (train.optimizer.precision_aware, False),
        "train.optimizer.cpu_offload_fraction": (train.optimizer.cpu_offload_fraction, 0.0),
    }
    for key, (value, off) in needing.items():
        if value != off:
            yield Fault(
                key,
                "needs CUDA and Transformer Engine",
                got=f"{shown(value)} on a CPU",
                hint="remove it",
            )
    defaults = KernelConfig()
    for field in fields(KernelConfig):
        value = getattr(train.kernels, field.name)
        if value != getattr(defaults, field.name):
            yield Fault(f"train.kernels.{field.name}", "has no effect on a CPU", got=value, hint="remove it")
    if "moe_act" in train.recompute_options.modules:
        yield Fault(
            "train.recompute_options.modules", said="moe_act needs grouped experts, which need CUDA; use moe or mlp"
        )
    if "layernorm" in train.recompute_options.modules:
        yield Fault(
            "train.recompute_options.modules",
            said="layernorm needs Transformer Engine, which needs CUDA; use core_attn or mlp",
        )


def model_faults(train: TrainConfig, architecture: Architecture) -> Iterator[Fault]:
    """Rejects options that have no effect on the model, or that do not fit its sizes."""
    parallel = Parallel.parse(train.parallel)
    yield from mtp_faults(train, architecture)
    yield from (_moe_faults if architecture.num_experts else _dense_faults)(train, architecture)
    if train.recompute is Recompute.FULL:
        yield from _recompute_faults(train, parallel, architecture)
    if train.fp8.recipe is not Fp8Recipe.OFF:
        multiple = train.fp8.token_multiple
        sizes = {"hidden_size": architecture.hidden_size}
        if not all(architecture.moe_layers):
            sizes["ffn_hidden_size / tp"] = architecture.ffn_hidden_size // parallel.tp
        if net := architecture.gated_delta_net:
            sizes["inputs of the gated delta net / tp"] = net.num_key_heads * net.projected // parallel.tp
        if architecture.num_experts:
            sizes["expert_ffn_hidden_size / etp"] = architecture.expert_ffn_hidden_size // parallel.etp
        for name, size in sizes.items():
            if size % multiple:
                yield Fault(
                    "train.fp8.recipe",
                    f"needs {name} to be a multiple of {multiple}, got {size} of {architecture.model_type}",
                    got=train.fp8.recipe,
                    hint="use another recipe or layout, or off",
                    stated=True,
                )


def mtp_faults(train: TrainConfig, architecture: Architecture) -> Iterator[Fault]:
    """Rejects a use of the head for multi-token prediction that the model or the layout does not allow."""
    mtp, pp = train.mtp, Parallel.parse(train.parallel).pp
    if not mtp.keeps:
        return
    if architecture.num_outputs is not None:
        yield Fault(MTP, "has no effect on a model that does not predict tokens", got=mtp.mode, hint="remove it")
    elif not architecture.mtp_layers:
        why = f"config.json of {architecture.model_type} promises no layer for multi-token prediction"
        yield Fault(MTP, "must be drop", got=mtp.mode, why=why, hint="remove it")
    elif architecture.mtp_layers > 1:
        why = f"config.json promises {architecture.mtp_layers} layers for multi-token prediction, rlframe has one"
        yield Fault(MTP, "must be drop", got=mtp.mode, why=why, hint="remove it")
    if mtp.trains and pp > 1:
        yield Fault(
            MTP,
            f"must be drop or keep with pp {pp}",
            got=mtp.mode,
            why="the head lies on the last stage and reads the embedding, which lies on the first",
            hint="use tp, ep or cp instead of pp",
        )
    whole = ("share_prompts", "logits_chunk_tokens")
    if mtp.trains and (others := [name for name in whole if getattr(train, name)]):
        yield Fault(
            MTP,
            f"must be drop or keep with train.{others[0]}",
            got=mtp.mode,
            why="the head's loss reads the logits of whole sequences",
        )


def _dense_faults(train: TrainConfig, architecture: Architecture) -> Iterator[Fault]:
    defaults = MoeConfig()
    for field in fields(MoeConfig):
        value = getattr(train.moe, field.name)
        if value != getattr(defaults, field.name):
            yield Fault(
                f"train.moe.{field.name}",
                f"has no effect on {architecture.model_type}, which is dense",
                got=value,
                hint="remove it",
            )
    for key in ("cutlass_experts", "expert_products", "permute_fusion"):
        value = getattr(train.kernels, key)
        if value != getattr(KernelConfig(), key):
            yield Fault(
                f"train.kernels.{key}",
                f"has no effect on {architecture.model_type}, which is dense",
                got=value,
                hint="remove it",
            )
    if modules := sorted(MODULES_OF_EXPERTS & set(train.recompute_options.modules)):
        yield Fault(
            "train.recompute_options.modules",
            said=f"{', '.join(modules)} has no effect on {architecture.model_type}, which is dense; use mlp",
        )


def _moe_faults(train: TrainConfig, architecture: Architecture) -> Iterator[Fault]:
    if train.moe.bias_update_rate and not (architecture.sigmoid_router and architecture.router_bias):
        yield Fault(
            "train.moe.bias_update_rate",
            f"has no effect on {architecture.model_type}, whose router has no bias",
            got=train.moe.bias_update_rate,
            hint="remove it",
        )


def _recompute_faults(train: TrainConfig, parallel: Parallel, architecture: Architecture) -> Iterator[Fault]:
    layers = train.recompute_options.layers
    try:
        chunks = chunk_layers(architecture.num_layers, **parallel.stages)
    except ValueError:
        # The layout does not fit the model, which is a fault of its own.
        return
    undivided = [count for count in chunks if count % layers]
    if layers > max(chunks):
        yield Fault(
            "train.recompute_options.layers",
            f"must be at most the {max(chunks)} layers of a chunk of a pipeline stage of {architecture.model_type}",
            got=layers,
        )
    elif train.recompute_options.method is RecomputeMethod.UNIFORM and undivided:
        yield Fault(
            "train.recompute_options.layers",
            f"must divide the {undivided[0]} layers of a chunk of a pipeline stage with method=uniform",
            got=layers,
            hint="or use method=block",
        )


def expert_faults(train: TrainConfig, *, online: bool) -> Iterator[Fault]:
    """Checks the rules of mixture-of-experts layers that do not depend on the model's sizes."""
    moe, parallel = train.moe, Parallel.parse(train.parallel)
    if moe.capacity_factor is not None and online and not moe.allow_token_drop:
        yield Fault(
            "train.moe.capacity_factor",
            "must be null with an online algorithm",
            got=moe.capacity_factor,
            why="the engine drops no tokens, so the trainer's logprobs would differ from the engine's",
            hint="train.moe.allow_token_drop=true accepts that",
        )
    if moe.allow_token_drop and not online:
        yield Fault(
            "train.moe.allow_token_drop",
            "has no effect with an algorithm that samples nothing, where capacity_factor needs no leave",
            got="true",
            hint="remove it",
        )
    yield from gather_faults(moe.dispatcher, parallel)
    if moe.dispatcher is Dispatcher.ALLGATHER and train.fp8.recipe is not Fp8Recipe.OFF:
        yield Fault(
            "train.moe.dispatcher",
            f"cannot pad experts' tokens for train.fp8.recipe={train.fp8.recipe}",
            got="allgather",
            stated=True,
        )
    if moe.dispatcher is Dispatcher.FLEX and importlib.util.find_spec("deep_ep") is None:
        yield Fault(
            "train.moe.dispatcher",
            "needs the package deep_ep (DeepEP), which is not installed",
            got="flex",
            hint="use alltoall",
            stated=True,
        )


def gather_faults(dispatcher: Dispatcher, parallel: Parallel, *, key: str = "train.parallel") -> Iterator[Fault]:
    """Rejects a dispatcher that gathers tokens of ranks that may have different numbers of them.

    Args:
        key: of the layout, which may be that of another model than the policy.
    """
    if dispatcher is not Dispatcher.ALLGATHER:
        return
    if parallel.pp > 1:
        yield Fault(
            "train.moe.dispatcher",
            f"is not supported with pipeline stages (p{parallel.pp} in {key}), whose packed micro-batches differ in "
            "length",
            got="allgather",
            hint="use alltoall",
            stated=True,
        )
    elif parallel.tp % (parallel.etp * parallel.ep):
        # Megatron-Core 0.16.1 gathers as if all ranks had equally many tokens, and overruns its buffer if they do not.
        yield Fault(
            "train.moe.dispatcher",
            "needs ranks with equally many tokens, so experts spread over the tensor-parallel ranks of one micro-batch",
            got="allgather",
            why=f"etp * ep = {parallel.etp * parallel.ep} must divide tp = {parallel.tp} in {key}={parallel}",
            hint="use alltoall",
            stated=True,
        )


def adapter_faults(train: TrainConfig) -> Iterator[Fault]:
    """Rejects options that have no effect on the training of adapters, or are not supported with it."""
    if train.lora is None:
        return
    if train.moe.freeze_router:
        yield Fault(
            "train.moe.freeze_router",
            "has no effect with train.lora, which trains no router",
            got="true",
            hint="remove it",
        )
    if train.moe.bias_update_rate:
        yield Fault(
            "train.moe.bias_update_rate",
            "must be 0 with train.lora",
            got=train.moe.bias_update_rate,
            why="PEFT's files and the training state of adapters have no place for the routers' bias",
            hint="remove it",
        )
    if train.fp8.recipe is not Fp8Recipe.OFF:
        # Adapters are plain products in train.dtype. How far FP8 modules with adapters are from the merged weights in
        # the engines has not been measured.
        yield Fault(
            "train.fp8.recipe",
            "is not supported with train.lora",
            got=train.fp8.recipe,
            why="adapters of modules that compute in FP8 are untested",
            hint="use fp8.recipe=off, or train without lora",
            stated=True,
        )


def sleep_faults(train: TrainConfig, *, online: bool, shared: bool) -> Iterator[Fault]:
    """Rejects sleep settings of a policy that has devices of its own."""
    if train.sleeps and not (online and shared):
        why = "cluster.colocate=false" if online else "an algorithm that samples nothing"
        yield Fault(f"train.{train.sleep_setting}", f"has no effect with {why}", got="true", hint="remove it")
