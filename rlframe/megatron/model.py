"""This rank's Megatron model, wrapped for data parallelism."""

import re
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rlframe.megatron.config import TrainConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.transformer import layer_spec, rope_scaling, transformer_config
from rlframe.models.families.base import Architecture, Shard
from rlframe.models.shards import padded_vocab_size

# Transformer Engine's fused modules keep norms and experts under other names; families know the local spec's only.
CANONICAL_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.linear_(fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_\1.weight"),
)


@dataclass(kw_only=True, slots=True)
class Model:
    """This rank's part of the model."""

    ddp: DistributedDataParallel
    """The Megatron module with its parameter and gradient buffers."""
    config: TransformerConfig
    architecture: Architecture
    shard: Shard
    """Which pieces of the checkpoint live here."""
    parameters: dict[str, Tensor]
    """By canonical name (local layer spec, local layer index)."""


def build(architecture: Architecture, train: TrainConfig, *, device: torch.device) -> Model:
    """This rank's model, with uninitialised weights. Needs `parallel.initialize` first."""
    parallel = Parallel.parse(train.parallel)
    config = transformer_config(architecture, train, parallel, device)
    decoder = module(architecture, config, device)
    decoder.model_type = ModelType.encoder_or_decoder
    mark_experts(decoder)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False, bucket_size=None
        ),
        decoder.to(device),
        disable_bucketing=True,
    )
    return Model(
        ddp=ddp,
        config=config,
        architecture=architecture,
        shard=shard_of(architecture, config, parallel),
        parameters={canonical_name(name): parameter.detach() for name, parameter in decoder.named_parameters()},
    )


def module(architecture: Architecture, config: TransformerConfig, device: torch.device) -> GPTModel:
    """Megatron's module of this rank."""
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(architecture, config, device),
        vocab_size=padded_vocab_size(architecture, tp=config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        **rope_scaling(architecture),
    )


def mark_experts(module: GPTModel) -> None:
    """Have expert gradients summed over the expert data-parallel group, whatever the expert layout.

    Megatron-Core 0.16.1 marks experts (`allreduce = False`) only when EP > 1. With EP 1 and ETP below TP it then sums
    them over the dense data-parallel ranks only, although each tensor-parallel rank saw other tokens: the gradients
    are silently too small. Found by tests/multiprocess/test_layouts.py at d1t2.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def canonical_name(name: str) -> str:
    """A parameter's name as the local layer spec would have it."""
    for pattern, replacement in CANONICAL_NAMES:
        name = pattern.sub(replacement, name)
    return name


def shard_of(architecture: Architecture, config: TransformerConfig, parallel: Parallel) -> Shard:
    """What part of the checkpoint this rank holds."""
    return Shard(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel.tp,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel.ep,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel.etp,
        first_layer=get_transformer_layer_offset(config),
        num_layers=architecture.num_layers // parallel.pp,
        has_embedding=parallel_state.is_pipeline_first_stage(),
        has_output=parallel_state.is_pipeline_last_stage(),
        padded_vocab_size=padded_vocab_size(architecture, tp=parallel.tp),
    )
