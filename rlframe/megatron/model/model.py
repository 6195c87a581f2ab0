"""This rank's Megatron model, wrapped for data parallelism."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rlframe.megatron.config.mtp import MtpConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.lora import adapters as lora
from rlframe.megatron.memory.activations import offload_layer_inputs
from rlframe.megatron.model.architecture_fields import model_arguments
from rlframe.megatron.model.layers.experts import dispatch
from rlframe.megatron.model.layers.heads import replace_output_layer
from rlframe.megatron.model.layers.latent import set_latent_epsilon
from rlframe.megatron.model.layers.parts import divide_logits, scale_embeddings
from rlframe.megatron.model.layers.rope import set_rope
from rlframe.megatron.model.mtp import ModelWithMtp, MtpHead, unbalanced
from rlframe.megatron.model.router_replay import RouterReplay
from rlframe.megatron.model.training_fields import accumulate_in_place, ddp_config, freeze_routers
from rlframe.megatron.model.transformer import layer_spec, transformer_config
from rlframe.megatron.packed import context_parallel, shared_prompts
from rlframe.megatron.vocab.chunked_head import ChunkedHead
from rlframe.megatron.vocab.float32_head import keep_float32
from rlframe.megatron.vocab.in_place import add_in_place
from rlframe.megatron.vocab.picked_rows import PickedRows
from rlframe.models.families.base import Architecture, Family, Shard
from rlframe.models.shards import by_chunk_name, load, padded_vocab_size
from rlframe.weight_sync.layout.memory import MemoryLayout, record

# Transformer Engine's fused modules have other names for norms and experts; families know only the local spec's names.
CANONICAL_NAMES = (
    (re.compile(r"self_attention\.linear_(qkv|in)\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (
        re.compile(r"mlp\.experts\.linear_(fc[12])\.(weight|bias)(\d+)$"),
        r"mlp.experts.local_experts.\3.linear_\1.\2",
    ),
    # Latent attention: the norm of the latent vector is part of the projection up from it.
    (re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r"self_attention.\1_layernorm.weight"),
)
IN_FLOAT32 = ("router.expert_bias", "indexer.k_norm_weight", "indexer.k_norm_bias", "indexer.weights_proj")
"""Ends of the names of weights that are float32 whatever the others are."""
FIXED = (*IN_FLOAT32, "indexer.wq_b", "indexer.wk")
"""Ends of the names of the weights that are buffers."""


@dataclass(kw_only=True, slots=True)
class Model:
    """This rank's part of the model."""

    chunks: Sequence[DistributedDataParallel | GPTModel]
    """The Megatron modules with their parameter and gradient buffers, bare if the model is frozen. One, or several with
    an interleaved pipeline."""
    config: TransformerConfig
    architecture: Architecture
    shards: list[Shard]
    """The parts of the checkpoint on this rank, by chunk."""
    parameters: dict[str, Tensor]
    """Parameters by canonical name (local layer spec, local layer index), behind `chunks.<n>.` if there are several
    chunks."""
    layout: MemoryLayout
    """Layout of the checkpoint's tensors in the parameters."""
    lora: lora.Lora | None
    """The adapters. None if the parameters themselves are trained."""
    mtp: MtpConfig | None = None
    """Settings with which the head for multi-token prediction is trained. None if it is not."""
    replay: RouterReplay | None = None
    """Makes the routers choose the engine's experts. None if they choose for themselves."""
    head: ChunkedHead | None = None
    """Computes the logits by chunks. None if they are computed at once, or by another rank."""
    picked: PickedRows | None = None
    """Picks the tokens whose logits are computed. None where those of all are, or by another rank."""
    dynamic: bool = False
    """See ContextParallelConfig."""
    float32: bool = False
    """Whether forward and backward passes compute in float32 on copies of the parameters, of which gradients reach the
    parameters in their own number format."""


def install_kernels(architecture: Architecture, config: TransformerConfig, train: TrainConfig) -> None:
    """Puts rlframe's kernels for a GPU in the place of functions of Megatron and Transformer Engine."""
    if config.bias_activation_fusion:
        from rlframe.megatron.model.layers import swiglu_kernels  # noqa: PLC0415 - needs Triton

        swiglu_kernels.install()
    if architecture.num_experts and train.kernels.expert_products:
        from rlframe.megatron.model.layers.experts import gradients, operation  # noqa: PLC0415 - needs Triton

        if gradients.is_available():
            gradients.install()
            operation.install()
            setattr(config, operation.JOINS, train.joins_experts)


def build(
    family: Family,
    architecture: Architecture,
    train: TrainConfig,
    *,
    device: torch.device,
    float32_logits: bool = False,
    frozen: bool = False,
) -> Model:
    """Returns this rank's model with uninitialised weights. `parallel.initialize` must be called first.

    Args:
        float32_logits: see ModelConfig.
        frozen: whether it is for forward passes only, without gradient buffers.
    """
    parallel = Parallel.parse(train.parallel)
    config = transformer_config(architecture, train, parallel, device)
    if device.type == "cuda":
        install_kernels(architecture, config, train)
    modules = [module(architecture, config, device, chunk=chunk) for chunk in range(parallel.vpp)]
    dispatch.prepare(modules, send_once=train.moe.send_once)
    if float32_logits and architecture.num_outputs is None and modules[-1].post_process:
        keep_float32(modules[-1].output_layer)
    if train.share_prompts:
        for each in modules:
            shared_prompts.prepare(each)
    if train.context_parallel.dynamic:
        for each in modules:
            context_parallel.follow(each)
    if architecture.whole_qk_norm:
        # Built with it, trained without: `finalize_model_grads` adds the gradients of norms of this name over
        # tensor-parallel ranks, which share those of single heads. Here each rank has the weights of its own heads.
        config.qk_layernorm = False
    shards = [shard_of(architecture, config, chunk=chunk) for chunk in range(parallel.vpp)]
    loader = partial(load, family=family, architecture=architecture, shards=shards)
    layout = record(loader, named_weights(modules), family.tensors(architecture))
    adapters = lora.attach(train.lora, modules, named_parameters(modules), layout) if train.lora else None
    if train.offload_activations and not frozen:
        for each in modules:
            offload_layer_inputs(each)
    chunks = [bare(module, device) if frozen else wrapped(module, train, device) for module in modules]
    return Model(
        chunks=chunks,
        config=config,
        architecture=architecture,
        shards=shards,
        parameters={name: value for name, value in named_weights(chunks).items() if name in layout.parameters},
        layout=layout,
        lora=adapters,
        mtp=train.mtp if train.mtp.trains and architecture.with_mtp and not frozen else None,
        replay=RouterReplay(modules, architecture, device) if train.moe.router_replay and not frozen else None,
        head=chunked_head(modules[-1], architecture, train, float32_logits=float32_logits),
        picked=picker(modules[-1], architecture, train),
        dynamic=train.context_parallel.dynamic,
    )


def chunked_head(
    module: GPTModel, architecture: Architecture, train: TrainConfig, *, float32_logits: bool
) -> ChunkedHead | None:
    """Returns what computes the logits by chunks, if that is wanted and the module has an output layer for them."""
    if train.logits_chunk_tokens is None or architecture.num_outputs is not None or not module.post_process:
        return None
    return ChunkedHead(module.output_layer, chunk_tokens=train.logits_chunk_tokens, float32=float32_logits)


def picker(module: GPTModel, architecture: Architecture, train: TrainConfig) -> PickedRows | None:
    """Returns what leaves logits out that no loss reads, such as those of prompts, if the module has an output layer
    for logits, and no head for multi-token prediction that reads those of whole sequences."""
    has_layer = architecture.num_outputs is None and module.post_process
    return PickedRows(module.output_layer) if has_layer and not train.mtp.trains else None


def module(architecture: Architecture, config: TransformerConfig, device: torch.device, *, chunk: int) -> GPTModel:
    """Returns chunk `chunk` of this rank's pipeline stage."""
    ends = {"ignore_virtual": False, "vp_stage": chunk}
    model = (ModelWithMtp if architecture.with_mtp else GPTModel)(
        config=config,
        transformer_layer_spec=layer_spec(architecture, config, device, chunk=chunk),
        vocab_size=padded_vocab_size(architecture, tp=config.tensor_model_parallel_size),
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        vp_stage=chunk,
        **model_arguments(architecture),
    )
    replace_output_layer(model, architecture.num_outputs)
    if architecture.with_mtp and model.post_process:
        model.mtp_head = mtp_head(architecture, config, device)
    if architecture.latent:
        set_latent_epsilon(model, architecture.latent.norm_eps)
    scale_embeddings(model, architecture)
    divide_logits(model, architecture)
    set_rope(model, architecture)
    return model


def mtp_head(architecture: Architecture, config: TransformerConfig, device: torch.device) -> MtpHead:
    """Returns the head for multi-token prediction."""
    config, index = unbalanced(config), architecture.layer_of_mtp
    # All layers, because a stage may have none of this kind.
    block = layer_spec(architecture, config, device, chunk=0)
    return MtpHead(config, block.layer_specs[index], block.layer_norm, layer_number=index + 1)


def bare(module: GPTModel, device: torch.device) -> GPTModel:
    """Returns the module for forward passes only."""
    mark_attention(module)
    return module.to(device).requires_grad_(False).eval()


def wrapped(module: GPTModel, train: TrainConfig, device: torch.device) -> DistributedDataParallel:
    """Returns the module with its parameters and gradients in flat buffers, which data-parallel ranks reduce."""
    module.model_type = ModelType.encoder_or_decoder
    mark_experts(module)
    mark_attention(module)
    if train.moe.freeze_router:
        freeze_routers(module)
    if isinstance(module, ModelWithMtp):
        module.detach = train.mtp.detach
        if module.post_process and not train.mtp.trains:
            module.mtp_head.requires_grad_(False)
    if device.type == "cuda" and train.kernels.gradient_accumulation_fusion:
        accumulate_in_place(module)
        communication = train.communication
        add_in_place(module, overlaps=communication.overlap_grad_reduce, in_float32=communication.reduce_in_float32)
    return DistributedDataParallel(
        module.config,
        ddp_config(train.communication),
        module.to(device),
        disable_bucketing=not train.communication.overlap_grad_reduce,
    )


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Returns Megatron's parameters by the names of `Model.parameters`. Chunks may be wrapped or not."""
    modules = [getattr(chunk, "module", chunk) for chunk in chunks]
    return by_chunk_name(
        [{canonical_name(name): each for name, each in module.named_parameters()} for module in modules]
    )


def named_weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors on this rank, trained or not, and the adapters."""
    fixed = by_chunk_name([dict(fixed_weights(getattr(chunk, "module", chunk))) for chunk in chunks])
    return {name: each.detach() for name, each in named_parameters(chunks).items()} | fixed


def fixed_weights(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the checkpoint's tensors that are not trained: the router's bias for the choice of experts, and the
    indexers of sparse attention."""
    return [(name, buffer) for name, buffer in module.named_buffers() if name.endswith(FIXED)]


def export_dtype(parameter: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the number format of a parameter in an export of `dtype`. Small tensors that are not trained stay in
    float32."""
    return torch.float32 if parameter.endswith(IN_FLOAT32) else dtype


def mark_experts(module: GPTModel) -> None:
    """Makes expert gradients be summed over the expert data-parallel group, for every expert layout.

    Workaround for Megatron-Core 0.16.1, which marks experts (`allreduce = False`) only if EP > 1. With EP 1 and ETP
    below TP it then sums them over the dense data-parallel ranks only, although each tensor-parallel rank saw other
    tokens: the gradients are silently too small. It also marks the bias of an expert's second matrix as one that
    tensor-parallel ranks share, so that its gradient, summed over them already, is summed again. The gradient norm
    would count that bias, and with Transformer Engine's grouped experts all their weights, on tensor-parallel rank 0
    only, although each rank has other elements of them after the sum. Later versions have
    https://github.com/NVIDIA/Megatron-LM/pull/5916. Not needed any more once
    tests/multiprocess/megatron/test_layouts.py passes at d1t2 without it.
    """
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
            parameter.sequence_parallel = False
            parameter.tensor_model_parallel = True


def mark_attention(module: GPTModel) -> None:
    """Makes the gradient norm count each parameter of special attention once over the tensor-parallel ranks.

    Workaround for Megatron-Core 0.16.1 and Transformer Engine 2.20, neither of which marks the sinks. Each rank has its
    own heads, so that only those of rank 0 would count. With Transformer Engine the projections into latent vectors are
    marked as split although every rank has them whole, so that they would count once per rank. Upstream:
    https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 8, for the sinks. Not needed any more once Megatron marks
    `softmax_offset` as tensor parallel, and Transformer Engine the projections as replicated.
    """
    for name, parameter in module.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.tensor_model_parallel = True
            # Transformer Engine makes them float32 and casts them when it uses them; checkpoint and engine store
            # bfloat16.
            parameter.data = parameter.data.to(module.config.params_dtype)
        elif "_down_proj." in name:
            parameter.tensor_model_parallel = False


def canonical_name(name: str) -> str:
    """Returns a parameter's name in the local layer spec."""
    for pattern, replacement in CANONICAL_NAMES:
        name = pattern.sub(replacement, name)
    return name


def shard_of(architecture: Architecture, config: TransformerConfig, *, chunk: int) -> Shard:
    """Returns the part of the checkpoint that chunk `chunk` of this rank holds, from Megatron's groups."""
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


def parameter_buffers(model: Model) -> list[Tensor]:
    """Returns the flat buffers, each [n], of which all parameters of the model are views."""
    return [buffer.param_data for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def routing_biases(model: Model) -> list[Tensor]:
    """Returns the bias of each router for the choice of experts: float32 and no parameter, but
    `train.moe.bias_update_rate` moves it."""
    return [value for name, value in model.parameters.items() if name.endswith("router.expert_bias")]
