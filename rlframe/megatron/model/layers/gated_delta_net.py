"""Gated delta net in the place of a layer's attention, over packed sequences, for Transformer Engine's layers and for
the local ones.

Megatron-Core's own needs flash-linear-attention, and 0.16.1 refuses packed sequences.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor

from rlframe.megatron.packed.context_parallel import heads_to_tokens, sharing, tokens_to_heads
from rlframe.megatron.packed.gated_delta_rule import convolve, gated_delta_rule, gated_norm
from rlframe.models.families.base import GatedDeltaNetDimensions

SPLIT_BY_HEADS = ("conv_weight", "dt_bias", "A_log")
"""Parameters of which tensor parallelism gives each rank those of its heads."""


@dataclass
class GatedDeltaNetSubmodules:
    """The two matrices: into the inputs of the key heads, with the layer's norm if it is fused, and back to H."""

    linear_in: ModuleSpec | type
    linear_out: ModuleSpec | type


class GatedDeltaNet(MegatronModule):
    """Convolution, gated delta rule and gated norm of this rank's heads (Yang et al. 2024, arXiv 2412.06464, figure 1).

    Inputs are stored by key head: its query, its key, its values, their gates, and two numbers for each value head.
    With context parallelism a rank exchanges its tokens of all heads for all tokens of a part of the heads, and back.
    """

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, net: GatedDeltaNetDimensions, **_: Any
    ):
        super().__init__(config)
        self.key_dim, self.value_dim = net.key_head_dim, net.value_head_dim
        self.values_per_key, self.channels = net.values_per_key, net.conv_channels
        self.num_keys = net.num_key_heads // config.tensor_model_parallel_size
        num_values = self.num_keys * self.values_per_key
        linear = {"config": config, "bias": False, "is_expert": False, "init_method": config.init_method}
        self.linear_in = build_module(
            submodules.linear_in,
            config.hidden_size,
            net.num_key_heads * net.projected,
            gather_output=False,
            skip_bias_add=False,
            **linear,
        )
        self.linear_out = build_module(
            submodules.linear_out,
            net.num_value_heads * net.value_head_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **linear,
        )
        dtype = config.params_dtype
        convolution = torch.zeros(self.num_keys * net.conv_channels, net.conv_kernel, dtype=dtype)
        self.conv_weight = torch.nn.Parameter(convolution)
        self.dt_bias = torch.nn.Parameter(torch.ones(num_values, dtype=dtype))
        self.A_log = torch.nn.Parameter(torch.zeros(num_values, dtype=dtype))
        self.norm_weight = torch.nn.Parameter(torch.ones(self.value_dim, dtype=dtype))
        for name in SPLIT_BY_HEADS:
            # Of an unmarked parameter the gradient's norm counts the first tensor-parallel rank only.
            getattr(self, name).tensor_model_parallel = True
        # Each rank normalises its heads of all tokens: the gradients of the ranks are summed.
        self.norm_weight.sequence_parallel = config.sequence_parallel
        again = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.recompute = "core_attn" in (again or [])

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [T / cp / tp, 1, H], and no bias, from as many hidden states."""
        assert packed_seq_params is not None
        inputs, _ = self.linear_in(hidden_states)
        # [T / cp, key heads, inputs of a key head].
        inputs = inputs.squeeze(1).unflatten(1, (self.num_keys, -1))
        heads = partial(self.heads, group=sharing(packed_seq_params))
        bounds = packed_seq_params.cu_seqlens_q
        if self.recompute and self.training:
            output = tensor_parallel.checkpoint(heads, False, inputs, bounds)
        else:
            output = heads(inputs, bounds)
        return self.linear_out(output.flatten(1)[:, None])

    def heads(self, inputs: Tensor, bounds: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
        """Returns [T / cp, key heads, values of a key head] from the inputs of all key heads of this rank.

        Args:
            group: the ranks that share the sequences. None if they are whole on this rank.
        """
        if group is None:
            return self.whole_sequences(inputs, bounds, slice(None))
        first, share = group.rank(), self.num_keys // group.size()
        own = tokens_to_heads(inputs, bounds, group)
        output = self.whole_sequences(own, bounds, slice(first * share, (first + 1) * share))
        return heads_to_tokens(output, bounds, group)

    def whole_sequences(self, inputs: Tensor, bounds: Tensor, keys: slice) -> Tensor:
        """Returns [T, key heads, values of a key head] of whole sequences.

        Args:
            inputs: [T, key heads, inputs] of the key heads `keys` of this rank.
        """
        conv, decays, biases = (
            parameter.unflatten(0, (self.num_keys, -1))[keys].flatten(0, 1)
            for parameter in (self.conv_weight, self.A_log, self.dt_bias)
        )
        values = self.values_per_key * self.value_dim
        mixed, gate, rate, step = inputs.split(
            [self.channels, values, self.values_per_key, self.values_per_key], dim=-1
        )
        mixed = convolve(mixed.flatten(1), conv, bounds).unflatten(1, (-1, self.channels))
        query, key, value = mixed.split([self.key_dim, self.key_dim, values], dim=-1)
        decay = -decays.float().exp() * F.softplus(step.flatten(1).float() + biases)
        value, gate = (part.unflatten(-1, (-1, self.value_dim)).flatten(1, 2) for part in (value, gate))
        output = gated_delta_rule(query, key, value, decay, rate.flatten(1).sigmoid(), bounds)
        normed = gated_norm(output, gate, self.norm_weight, self.config.layernorm_epsilon)
        return normed.unflatten(1, (-1, self.values_per_key)).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the parameters with their positions in a distributed checkpoint."""
        state = {name: parameter for name, parameter in self.named_parameters(recurse=False)}
        found = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(SPLIT_BY_HEADS, 0),
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        for name, child in self.named_children():
            found |= sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata)
        return found
