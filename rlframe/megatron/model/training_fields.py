"""Translates the options of training into fields of Megatron's configurations and environment variables."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from rlframe.megatron.config.options import (
    CommunicationConfig,
    Fp8Config,
    Fp8Recipe,
    KernelConfig,
    MomentDtype,
    Recompute,
    RouterDtype,
)
from rlframe.megatron.config.train import TrainConfig

ROUTER_DTYPES = {RouterDtype.FLOAT32: "fp32", RouterDtype.FLOAT64: "fp64"}
MOMENT_DTYPES = {MomentDtype.FLOAT32: torch.float32, MomentDtype.BFLOAT16: torch.bfloat16}


def transformer_fields(train: TrainConfig, device: torch.device, *, has_experts: bool) -> dict[str, Any]:
    """Returns the fields of TransformerConfig about how a step is computed."""
    fields = kernel_fields(train.kernels, device) | recompute_fields(train) | fp8_fields(train.fp8)
    fields["deterministic_mode"] = train.deterministic and device.type == "cuda"
    if has_experts:
        fields |= moe_fields(train, device)
    return fields


def kernel_fields(kernels: KernelConfig, device: torch.device) -> dict[str, Any]:
    """Returns the fields about operations that run as one kernel.

    On a CPU the rotary embedding goes through the fused function's place (`platform`). Megatron's activation fusion is
    torch.compile, which would start a compiler. Always off are bias and dropout fusion, which without bias and dropout
    is one addition; persist_layer_norm, which is APEX's; and Megatron's gradient_accumulation_fusion, which needs APEX:
    see `accumulate_in_place`.
    """
    cuda = device.type == "cuda"
    return {
        "attention_backend": AttnBackend[kernels.attention.value] if cuda else AttnBackend.auto,
        "apply_rope_fusion": kernels.rope_fusion or not cuda,
        "bias_activation_fusion": kernels.activation_fusion and cuda,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
    }


def recompute_fields(train: TrainConfig) -> dict[str, Any]:
    """Returns the fields about activations that are recomputed."""
    options = train.recompute_options
    if train.recompute is Recompute.FULL:
        return {
            "recompute_granularity": "full",
            "recompute_method": options.method.value,
            "recompute_num_layers": options.layers,
        }
    if train.recompute is Recompute.SELECTIVE:
        return {"recompute_granularity": "selective", "recompute_modules": list(options.modules)}
    return {}


def fp8_fields(fp8: Fp8Config) -> dict[str, Any]:
    """Returns the fields about 8-bit floats. Parameters stay bfloat16, so that weight sync and checkpoints are
    unchanged."""
    if fp8.recipe is Fp8Recipe.OFF:
        return {}
    return {"fp8": fp8.format.value, "fp8_recipe": fp8.recipe.value}


def moe_fields(train: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Returns the fields about experts. The two coefficients only switch the losses on; `expert_load` sets their values
    for each step.

    Megatron's default would move an expert bias by 0.001 a step, away from the engine's.
    """
    moe = train.moe
    cuda = device.type == "cuda"
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": moe.dispatcher.value,
        "moe_router_dtype": ROUTER_DTYPES[moe.router_dtype],
        "moe_router_load_balancing_type": "aux_loss" if moe.aux_loss_coefficient else "none",
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
        "moe_z_loss_coeff": moe.z_loss_coefficient or None,
        "moe_router_bias_update_rate": moe.bias_update_rate,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "moe_grouped_gemm": cuda,
        "moe_permute_fusion": cuda and train.kernels.permute_fusion,
        "moe_router_padding_for_quantization": train.fp8.recipe is not Fp8Recipe.OFF,
    }
    return fields


def ddp_config(communication: CommunicationConfig) -> DistributedDataParallelConfig:
    """Returns the settings of gradient sums and parameter gathers. Without overlap there is one bucket, sent at
    once."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=communication.reduce_in_float32,
        overlap_grad_reduce=communication.overlap_grad_reduce,
        overlap_param_gather=communication.overlap_param_gather,
        bucket_size=communication.bucket_parameters,
    )


def optimizer_fields(train: TrainConfig) -> dict[str, Any]:
    """Returns fields of Megatron's OptimizerConfig other than AdamW's own numbers."""
    optimizer = train.optimizer
    fields: dict[str, Any] = {}
    if optimizer.cpu_offload_fraction:
        fields |= {
            "optimizer_cpu_offload": True,
            # Otherwise its float32 main weights stay on the device next to the copies that the CPU updates.
            "use_precision_aware_optimizer": True,
            "optimizer_offload_fraction": optimizer.cpu_offload_fraction,
            # The CPU updates a parameter while the gradients of the next ones arrive.
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    if optimizer.precision_aware:
        dtype = MOMENT_DTYPES[optimizer.moment_dtype]
        fields |= {
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": dtype,
            "exp_avg_sq_dtype": dtype,
            "main_grads_dtype": torch.float32 if train.communication.reduce_in_float32 else torch.bfloat16,
        }
    return fields


def accumulate_in_place(module: nn.Module) -> int:
    """Makes Transformer Engine's linear layers add weight gradients to the gradient buffer. Returns the number of these
    layers.

    Workaround for Megatron-Core 0.16.1, which has one switch for them and for its own output layer, whose kernel is
    APEX's: with it on, it refuses to build the model without APEX. Transformer Engine reads its own switch at every
    forward pass. Not needed any more once gradient_accumulation_fusion works without APEX.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "fuse_wgrad_accumulation")]
    for layer in layers:
        layer.fuse_wgrad_accumulation = True
    return len(layers)


def freeze_routers(module: nn.Module) -> None:
    """Freezes the routers, so that they have no part in the gradient buffer and the optimizer. Export and weight sync
    read them as before. Must be called before the data-parallel wrapper is created."""
    for part in module.modules():
        if isinstance(part, TopKRouter):
            for parameter in part.parameters():
                parameter.requires_grad = False


def token_multiple(config: TransformerConfig) -> int:
    """Returns the number that the tokens of one rank must be a multiple of, besides the requirements of its layout.

    On a GPU it is a multiple of 4: of other numbers of rows Transformer Engine computes norms by its general kernels,
    which take twice as long (2.20, `NormalizationPlanRegistry::getNormalizationPlan`). Not with losses of routers,
    which count padding.
    """
    multiple = 1 if config.fp8 is None else Fp8Config(recipe=Fp8Recipe(config.fp8_recipe)).token_multiple
    counts_padding = config.moe_router_load_balancing_type != "none" or config.moe_z_loss_coeff
    has_experts = config.num_moe_experts is not None
    return multiple if config.use_cpu_initialization or (has_experts and counts_padding) else math.lcm(multiple, 4)
