"""Gated delta net: attention with a state instead of keys and values (Yang et al. 2024, arXiv 2412.06464).

rlframe's own layout, because Megatron has none for packed sequences: inputs are stored by key head, the channels of the
convolution first, then gates, then the two numbers of each value head. Tensor parallelism takes whole key heads, and a
distributed checkpoint splits and joins as it does for any column-parallel matrix.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlframe.models.families import _mtp
from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, columns, rows
from rlframe.models.families.base import Architecture, GatedDeltaNetDimensions, Shard

NEEDED = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def faults(hf: Mapping[str, Any]) -> list[str]:
    """Returns what is missing from config.json or contradicts itself."""
    found = [f"{key} is missing" for key in NEEDED if hf.get(key) is None]
    # vLLM reads this key, which transformers does not.
    if hf.get("output_gate_type", "silu") not in ("silu", "swish"):
        found.append(f"output_gate_type must be silu, got {hf['output_gate_type']!r:.60}")
    if not found and hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
        heads = hf["linear_num_value_heads"]
        found.append(f"linear_num_key_heads {hf['linear_num_key_heads']} must divide linear_num_value_heads {heads}")
    return found


def features(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `Architecture` about the layers with a gated delta net, and about the others beside
    them."""
    layers, interval = hf["num_hidden_layers"], hf.get("full_attention_interval") or 4
    kinds = hf.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
    ]
    return {
        "gated_delta_net": GatedDeltaNetDimensions(
            num_key_heads=hf["linear_num_key_heads"],
            num_value_heads=hf["linear_num_value_heads"],
            key_head_dim=hf["linear_key_head_dim"],
            value_head_dim=hf["linear_value_head_dim"],
            conv_kernel=hf["linear_conv_kernel_dim"],
        ),
        "gated_delta_layers": tuple(kind == "linear_attention" for kind in kinds),
        "qk_norm": True,
        "output_gate": True,
        "zero_centered_norms": True,
        # Qwen3-Next's config.json does not say that it has one.
        "mtp_layers": _mtp.count(hf, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=1),
    }


class GatedDeltaNet(LayerSpec):
    """All inputs in two matrices ordered by key head, as in Qwen3-Next."""

    def tensors(self, a: Architecture) -> Shapes:
        net, hidden = dimensions(a), a.hidden_size
        values = net.num_value_heads * net.value_head_dim
        return self.inputs(net, hidden) | {
            "linear_attn.conv1d.weight": (net.num_key_heads * net.conv_channels, 1, net.conv_kernel),
            "linear_attn.dt_bias": (net.num_value_heads,),
            "linear_attn.A_log": (net.num_value_heads,),
            "linear_attn.norm.weight": (net.value_head_dim,),
            "linear_attn.out_proj.weight": (hidden, values),
        }

    def inputs(self, net: GatedDeltaNetDimensions, hidden: int) -> Shapes:
        """Returns the shapes of the matrices whose products are the inputs."""
        numbers = 2 * net.num_value_heads
        return {
            "linear_attn.in_proj_qkvz.weight": (net.num_key_heads * net.projected - numbers, hidden),
            "linear_attn.in_proj_ba.weight": (numbers, hidden),
        }

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        net, hidden = dimensions(a), a.hidden_size
        keys, values = net.num_key_heads // shard.tp_size, net.num_value_heads // shard.tp_size
        return {
            "self_attention.linear_in.weight": (keys * net.projected, hidden),
            "self_attention.conv_weight": (keys * net.conv_channels, net.conv_kernel),
            "self_attention.dt_bias": (values,),
            "self_attention.A_log": (values,),
            "self_attention.norm_weight": (net.value_head_dim,),
            "self_attention.linear_out.weight": (hidden, values * net.value_head_dim),
        }

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        ours, theirs = parameters.within("self_attention."), checkpoint.within("linear_attn.")
        net = dimensions(a)
        keys = net.num_key_heads // shard.tp_size
        mine = slice(shard.tp_rank * keys, (shard.tp_rank + 1) * keys)
        self.load_inputs(ours["linear_in.weight"].unflatten(0, (keys, -1)), theirs, net, mine)
        by_kind(ours["conv_weight"].unflatten(0, (keys, -1)), theirs["conv1d.weight"].squeeze(1), net, mine)
        for name in ("dt_bias", "A_log"):
            ours[name].copy_(rows(theirs[name], shard.tp_rank, shard.tp_size))
        ours["norm_weight"].copy_(theirs["norm.weight"])
        ours["linear_out.weight"].copy_(columns(theirs["out_proj.weight"], shard.tp_rank, shard.tp_size))

    def load_inputs(self, inputs: Tensor, theirs: Scope, net: GatedDeltaNetDimensions, mine: slice) -> None:
        """Fills [key heads, projected, H] of the key heads `mine`."""
        numbers = 2 * net.values_per_key
        for part, name in ((inputs[:, :-numbers], "in_proj_qkvz"), (inputs[:, -numbers:], "in_proj_ba")):
            part.copy_(theirs[f"{name}.weight"].unflatten(0, (net.num_key_heads, -1))[mine])


class SplitGatedDeltaNet(GatedDeltaNet):
    """All queries, all keys and all values in one matrix, and one matrix for each other input, as in Qwen3.5."""

    def inputs(self, net: GatedDeltaNetDimensions, hidden: int) -> Shapes:
        values = net.num_value_heads
        return {
            "linear_attn.in_proj_qkv.weight": (net.num_key_heads * net.conv_channels, hidden),
            "linear_attn.in_proj_z.weight": (values * net.value_head_dim, hidden),
            "linear_attn.in_proj_b.weight": (values, hidden),
            "linear_attn.in_proj_a.weight": (values, hidden),
        }

    def load_inputs(self, inputs: Tensor, theirs: Scope, net: GatedDeltaNetDimensions, mine: slice) -> None:
        values = net.values_per_key
        mixed, gates, *numbers = inputs.split([net.conv_channels, values * net.value_head_dim, values, values], dim=1)
        by_kind(mixed, theirs["in_proj_qkv.weight"], net, mine)
        for part, name in zip((gates, *numbers), ("z", "b", "a"), strict=True):
            part.copy_(theirs[f"in_proj_{name}.weight"].unflatten(0, (net.num_key_heads, -1))[mine])


def dimensions(a: Architecture) -> GatedDeltaNetDimensions:
    """Returns the dimensions of a model that has such layers."""
    assert a.gated_delta_net is not None
    return a.gated_delta_net


def by_kind(target: Tensor, tensor: Tensor, net: GatedDeltaNetDimensions, mine: slice) -> None:
    """Fills [key heads, channels, ...] of the key heads `mine` from a tensor with all queries, then all keys, then all
    values."""
    widths = [net.key_head_dim, net.key_head_dim, net.values_per_key * net.value_head_dim]
    kinds = tensor.split([net.num_key_heads * width for width in widths])
    for part, kind in zip(target.split(widths, dim=1), kinds, strict=True):
        part.copy_(kind.unflatten(0, (net.num_key_heads, -1))[mine])
