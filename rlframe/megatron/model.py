"""This rank's Megatron model, wrapped for data parallelism."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rlframe.megatron import lora
from rlframe.megatron.config import TrainConfig
from rlframe.megatron.layout import Parallel
from rlframe.megatron.transformer import layer_spec, rope_scaling, transformer_config
from rlframe.models.families.base import Architecture, Family, Shard
from rlframe.models.shards import by_chunk_name, load, padded_vocab_size
from rlframe.weight_sync.layout import Layout, record

# Transformer Engine's fused modules keep norms and experts under other names; families know the local spec's only.
CANONICAL_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.linear_(fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_\1.weight"),
)


@dataclass(kw_only=True, slots=True)
class Model:
    """This rank's part of the model."""

    chunks: list[DistributedDataParallel]
    """The Megatron modules with their parameter and gradient buffers: one, or several with an interleaved pipeline."""
    config: TransformerConfig
    architecture: Architecture
    shards: list[Shard]
    """Which pieces of the checkpoint live here, by chunk."""
    parameters: dict[str, Tensor]
    """By canonical name (local layer spec, local layer index), behind `chunks.<n>.` where there are several chunks."""
    layout: Layout
    """Where the checkpoint's tensors lie in the parameters."""
    lora: lora.Lora | None
    """The adapters; None where the parameters themselves are trained."""


def build(family: Family, architecture: Architecture, train: TrainConfig, *, device: torch.device) -> Model:
    """This rank's model, with uninitialised weights. Needs `parallel.initialize` first."""
    parallel = Parallel.parse(train.parallel)
    config = transformer_config(architecture, train, parallel, device)
    modules = [module(architecture, config, device, chunk=chunk) for chunk in range(parallel.vpp)]
    shards = [shard_of(architecture, config, chunk=chunk) for chunk in range(parallel.vpp)]
    named = named_parameters(modules)
    loader = partial(load, family=family, architecture=architecture, shards=shards)
    layout = record(loader, named, family.tensors(architecture))
    adapters = lora.attach(train.lora, modules, named, layout) if train.lora else None
    chunks = [wrapped(module, device) for module in modules]
    return Model(
        chunks=chunks,
        config=config,
        architecture=architecture,
        shards=shards,
        # The wrapper has moved what is trained into its buffers.
        parameters={name: parameter.detach() for name, parameter in named.items()},
        layout=layout,
        lora=adapters,
    )


def module(architecture: Architecture, config: TransformerConfig, device: torch.device, *, chunk: int) -> GPTModel:
    """Chunk `chunk` of this rank's pipeline stage."""
    ends = {"ignore_virtual": False, "vp_stage": chunk}
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(architecture, config, device, chunk=chunk),
        vocab_size=padded_vocab_size(architecture, tp=config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
        vp_stage=chunk,
        **rope_scaling(architecture),
    )


def wrapped(module: GPTModel, device: torch.device) -> DistributedDataParallel:
    """The module with its parameters and gradients in flat buffers, which data-parallel ranks reduce."""
    module.model_type = ModelType.encoder_or_decoder
    mark_experts(module)
    return DistributedDataParallel(
        module.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False, bucket_size=None
        ),
        module.to(device),
        disable_bucketing=True,
    )


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Megatron's parameters by the names of `Model.parameters`. Chunks may be wrapped or not."""
    modules = [getattr(chunk, "module", chunk) for chunk in chunks]
    return by_chunk_name(
        [{canonical_name(name): each for name, each in module.named_parameters()} for module in modules]
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


def shard_of(architecture: Architecture, config: TransformerConfig, *, chunk: int) -> Shard:
    """What part of the checkpoint chunk `chunk` of this rank holds, as Megatron's groups have it."""
    return Shard(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        first_layer=get_transformer_layer_offset(config, vp_stage=chunk),
        num_layers=get_num_layers_to_build(config, vp_stage=chunk),
        has_embedding=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        has_output=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        padded_vocab_size=padded_vocab_size(architecture, tp=config.tensor_model_parallel_size),
    )
