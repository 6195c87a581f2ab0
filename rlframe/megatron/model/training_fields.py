"""From the options of training to the fields of Megatron's configurations, and to the process's environment."""

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
    """Fields of TransformerConfig that say how a step is computed."""
    fields = kernel_fields(train.kernels, device) | recompute_fields(train) | fp8_fields(train.fp8)
    fields["deterministic_mode"] = train.deterministic and device.type == "cuda"
    if has_experts:
        fields |= moe_fields(train, device)
    return fields


def kernel_fields(kernels: KernelConfig, device: torch.device) -> dict[str, Any]:
    """Which operations are one kernel.

    On a CPU the rotary embedding goes through the fused function's place (`platform`), and torch.compile, which is what
    Megatron's activation fusion is, would start a compiler. Off everywhere: bias and dropout fusion, for without bias
    and dropout it is one addition; persist_layer_norm, which is APEX's; Megatron's gradient_accumulation_fusion, which
    needs APEX: see `accumulate_in_place`.
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
    """Which activations are computed again."""
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
    """8-bit floats. Parameters stay bfloat16, so that weight sync and checkpoints see them as ever."""
    if fp8.recipe is Fp8Recipe.OFF:
        return {}
    return {"fp8": fp8.format.value, "fp8_recipe": fp8.recipe.value}


def moe_fields(train: TrainConfig, device: torch.device) -> dict[str, Any]:
    """How experts are computed. The two coefficients only switch the losses on: `expert_load` sets them for each step.

    Megatron's own default would move an expert bias by 0.001 a step, away from the engine's.
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
    """How gradients are summed and parameters gathered. Without overlap there is one bucket, sent at once."""
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=communication.reduce_in_float32,
        overlap_grad_reduce=communication.overlap_grad_reduce,
        overlap_param_gather=communication.overlap_param_gather,
        bucket_size=communication.bucket_parameters,
    )


def optimizer_fields(train: TrainConfig) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig beyond AdamW's own numbers."""
    optimizer = train.optimizer
    fields: dict[str, Any] = {}
    if optimizer.cpu_offload_fraction:
        fields |= {
            "optimizer_cpu_offload": True,
            # Or else its float32 main weights stay on the device beside the copies that the CPU updates.
            "use_precision_aware_optimizer": True,
            "optimizer_offload_fraction": optimizer.cpu_offload_fraction,
            # A parameter is updated by the CPU while the gradients of the next ones arrive.
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
    """Has Transformer Engine's linear layers add weight gradients to the gradient buffer; how many there were.

    Megatron-Core 0.16.1 has one switch for them and for its own output layer, whose kernel is APEX's: on, it refuses to
    build the model without APEX. Transformer Engine reads its own switch at every forward.
    """
    layers = [layer for layer in module.modules() if hasattr(layer, "fuse_wgrad_accumulation")]
    for layer in layers:
        layer.fuse_wgrad_accumulation = True
    return len(layers)


def freeze_routers(module: nn.Module) -> None:
    """Routers take no gradient, and so no place in the gradient buffer and the optimizer; export and weight sync read
    them as ever. Call before the data-parallel wrapper is made."""
    for part in module.modules():
        if isinstance(part, TopKRouter):
            for parameter in part.parameters():
                parameter.requires_grad = False


def token_multiple(config: TransformerConfig) -> int:
    """What the tokens of one rank must be a multiple of, besides what its layout asks for."""
    return 1 if config.fp8 is None else Fp8Config(recipe=Fp8Recipe(config.fp8_recipe)).token_multiple
