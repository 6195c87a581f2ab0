"""Translates a family's Architecture into Megatron's configuration, layers and arguments."""

from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from rlframe.megatron.compat import LatentAttention, submodules
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.megatron.cpu.attention import PackedAttention, RmsNorm
from rlframe.megatron.cpu.local_layers import ExpertOutput, WholeLinear, clamped_glu
from rlframe.megatron.model.architecture_fields import special_fields, yarn_attributes
from rlframe.megatron.model.layers.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from rlframe.megatron.model.layers.head_norm import HeadNorm
from rlframe.megatron.model.layers.parts import set_parts
from rlframe.megatron.model.layers.query_key import QueryKeyAttention, turns_whole_heads
from rlframe.megatron.model.layers.sparse_attention import SparseLatentAttention
from rlframe.megatron.model.layers.whole_norms import KeyNorm, QueryNorm
from rlframe.megatron.model.training_fields import transformer_fields
from rlframe.models.families.base import Architecture
from rlframe.models.stages import chunk_layers

DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


def transformer_config(
    architecture: Architecture, train: TrainConfig, parallel: Parallel, device: torch.device
) -> TransformerConfig:
    """Returns Megatron's configuration of the architecture.

    Raises:
        AssertionError: this Megatron-Core does not know a field, which would be a setting without effect.
    """
    dtype = DTYPES[train.dtype]
    wanted: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_kv_heads,
        "kv_channels": architecture.head_dim,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        # Dropout would make the trainer's logprobs differ from the engine's.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.tp > 1,
        "pipeline_model_parallel_size": parallel.pp,
        **pipeline_fields(architecture, parallel),
        "context_parallel_size": parallel.cp,
        "cp_comm_type": train.context_parallel.communication.value,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        # Packed micro-batches differ in length; stages exchange the shape of each.
        "variable_seq_lengths": parallel.pp > 1,
        # The default dispatcher refuses variable lengths, even in a dense model.
        "moe_token_dispatcher_type": "alltoall",
        # Weights are loaded over it, but only initialisation marks them as tensor-parallel. Megatron counts unmarked
        # ones on one rank only, and the gradient norm for clipping is silently too small.
        "perform_initialization": True,
        "use_cpu_initialization": device.type == "cpu",
        # Megatron then leaves the loss unscaled: see `finalize_gradients` for the whole contract.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": finalize_gradients,
    }
    if architecture.num_experts:
        wanted |= moe_fields(architecture)
    wanted |= transformer_fields(train, device, has_experts=bool(architecture.num_experts))
    wanted |= special_fields(architecture, on_cpu=device.type == "cpu")
    kind = MLATransformerConfig if architecture.latent else TransformerConfig
    unknown = wanted.keys() - {field.name for field in fields(kind)}
    assert not unknown, f"{kind.__name__} of this Megatron-Core has no {', '.join(sorted(unknown))}: was it renamed?"
    config = kind(**wanted)
    for name, value in yarn_attributes(architecture).items():
        setattr(config, name, value)
    return config


def pipeline_fields(architecture: Architecture, parallel: Parallel) -> dict[str, Any]:
    """Returns the fields about the layers of each pipeline chunk: always as Megatron's own list, equal or not,
    interleaved or not."""
    if parallel.pp == 1:
        return {}
    chunks = [["decoder"] * count for count in chunk_layers(architecture.num_layers, **parallel.stages)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    # Interleaved, a stage sends in both directions at once; in one batch two stages would mix up each other's messages.
    separate = {"overlap_p2p_comm": True, "batch_p2p_comm": False} if parallel.vpp > 1 else {}
    return {"pipeline_model_parallel_layout": chunks, **separate}


def moe_fields(architecture: Architecture) -> dict[str, Any]:
    """Returns the mixture-of-experts part of the architecture."""
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_ffn_hidden_size": architecture.expert_ffn_hidden_size,
        "moe_router_topk": architecture.experts_per_token,
        "moe_router_pre_softmax": not architecture.norm_topk_prob,
        "moe_layer_freq": [int(sparse) for sparse in architecture.moe_layers],
        "add_bias_linear": False,
    }


def finalize_gradients(model: list, num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Adds up gradients over ranks without a division.

    The loss contract: every micro-batch returns a *sum* over its tokens of weight * token loss, where the weights
    already hold the global denominators (`Algorithm.token_weights`). The gradient wanted is then the plain sum over
    micro-batches and over the DP x CP ranks. Megatron, with `calculate_per_token_loss`:
      1. schedules.forward_step_calc_loss: a 3-tuple (loss, num_tokens, ...) is left undivided;
      2. DDP: gradient_scaling_factor = 1, gradients are summed over DP x CP (experts: over expert DP, and the
         all-to-all has already summed over EP);
      3. finalize_model_grads: divides by the global num_tokens, unless it is None.
    Passing None in step 3 leaves exactly the sum. Read in megatron-core 0.16.1 and 0.19.2; proven by the layout tests.
    """
    finalize_model_grads(model, None, **groups)


def layer_spec(architecture: Architecture, config: TransformerConfig, device: torch.device, *, chunk: int) -> Any:
    """Returns the layers of chunk `chunk` of this pipeline stage: Transformer Engine's on CUDA; on CPU the local ones
    with rlframe's norm and packed attention."""
    if device.type == "cuda":
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk)
        # Layers of one kind are one object.
        for layer in {id(layer): layer for layer in block.layer_specs}.values():
            set_parts(architecture, config, layer, norm=block.layer_norm)
        offset = get_transformer_layer_offset(config, vp_stage=chunk)
        block.layer_specs = [
            with_gated_delta_net(architecture, layer, cuda=True) if architecture.has_gated_delta_net(index) else layer
            for index, layer in enumerate(block.layer_specs, start=offset)
        ]
        for layer in block.layer_specs:
            set_activation(architecture, layer)
            attention = layer.submodules.self_attention
            if architecture.latent:
                attention.module = LatentAttention
            if architecture.indexer:
                make_sparse(architecture, attention)
            if architecture.whole_qk_norm:
                attention.submodules.q_layernorm, attention.submodules.k_layernorm = QueryNorm, KeyNorm
            elif architecture.qk_norm and not config.layernorm_zero_centered_gamma:
                attention.submodules.q_layernorm = attention.submodules.k_layernorm = HeadNorm
            if config.apply_rope_fusion and turns_whole_heads(architecture, tp=config.tensor_model_parallel_size):
                attention.module = QueryKeyAttention
        return block
    offset = get_transformer_layer_offset(config, vp_stage=chunk)
    count = get_num_layers_to_build(config, vp_stage=chunk)
    layers = [local_layer(architecture, config, index) for index in range(offset, offset + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def with_gated_delta_net(architecture: Architecture, layer: ModuleSpec, *, cuda: bool) -> ModuleSpec:
    """Returns the layer with a gated delta net in the place of its attention. On CUDA the first matrix has the norm
    before it, as the one of queries, keys and values has."""
    names = dict(layer.submodules.sharded_state_dict_keys_map)
    if cuda:
        matrices = GatedDeltaNetSubmodules(TELayerNormColumnParallelLinear, TERowParallelLinear)
    else:
        matrices = GatedDeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear)
        names["input_layernorm."] = "self_attention.linear_in.layer_norm_"
    attention = ModuleSpec(module=GatedDeltaNet, params={"net": architecture.gated_delta_net}, submodules=matrices)
    submodules = replace(layer.submodules, self_attention=attention, sharded_state_dict_keys_map=names)
    return replace(layer, submodules=submodules)


def local_layer(architecture: Architecture, config: TransformerConfig, index: int) -> ModuleSpec:
    """Returns Megatron's local layer number `index` with rlframe's norm and attention, because Megatron's support
    neither packing nor SP."""
    sparse = bool(architecture.num_experts) and architecture.moe_layers[index]
    num_experts = architecture.num_experts if sparse else None
    latent = architecture.latent is not None
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        qk_layernorm=architecture.qk_norm or latent,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    if num_experts:
        # Transformer Engine keeps this norm separate in layers with experts, and fuses it only in dense ones;
        # Megatron-Core 0.16.1 names it in checkpoints as if it were fused in all.
        spec.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    spec.submodules.input_layernorm = RmsNorm
    spec.submodules.pre_mlp_layernorm = RmsNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if latent:
        spec.submodules.self_attention.module = LatentAttention
        attention.linear_q_down_proj = attention.linear_kv_down_proj = WholeLinear
        attention.q_layernorm = attention.kv_layernorm = RmsNorm
        if architecture.indexer:
            make_sparse(architecture, spec.submodules.self_attention)
    elif architecture.whole_qk_norm:
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    elif architecture.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    if architecture.linear_bias and num_experts:
        submodules(submodules(spec.submodules.mlp).experts).linear_fc2 = ExpertOutput
    set_activation(architecture, spec)
    set_parts(architecture, config, spec, norm=RmsNorm)
    return with_gated_delta_net(architecture, spec, cuda=False) if architecture.has_gated_delta_net(index) else spec


def make_sparse(architecture: Architecture, attention: ModuleSpec) -> None:
    """Gives latent attention the architecture's indexer, and the attention that takes its choice, on every device."""
    attention.module = SparseLatentAttention
    attention.params = (attention.params or {}) | {"indexer": architecture.indexer}
    attention.submodules.core_attention = PackedAttention


def set_activation(architecture: Architecture, layer: ModuleSpec) -> None:
    """Makes the layer's experts compute the architecture's activation if Megatron does not have it."""
    mlp = submodules(layer.submodules.mlp)
    if architecture.clamped_glu and isinstance(mlp, MoESubmodules):
        submodules(mlp.experts).activation_func = clamped_glu(architecture.clamped_glu)
