"""The head for multi-token prediction in checkpoints: two norms, a projection, a decoder layer, a norm.

Copies of the embedding and of the output layer, which DeepSeek and GLM put beside it, are neither loaded nor exported:
engines take those of the model.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, under
from rlframe.models.families.base import Architecture, Shard


class MtpNames(NamedTuple):
    """A checkpoint's names of the head, with {layers} for the number of the decoder's layers."""

    layer: str
    """Beginning of the names of its decoder layer."""
    embedding_norm: str
    state_norm: str
    projection: str
    """The matrix [H, 2 H], whose input is the normed embedding before the normed state."""
    final_norm: str

    def of(self, a: Architecture) -> "MtpNames":
        """Returns the names in a checkpoint of this architecture."""
        return MtpNames(*(name.format(layers=a.num_layers) for name in self))


BEHIND_LAYERS = MtpNames(
    layer="model.layers.{layers}.",
    embedding_norm="model.layers.{layers}.enorm.weight",
    state_norm="model.layers.{layers}.hnorm.weight",
    projection="model.layers.{layers}.eh_proj.weight",
    final_norm="model.layers.{layers}.shared_head.norm.weight",
)
"""The names of DeepSeek and GLM."""
APART = MtpNames(
    layer="mtp.layers.0.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    final_norm="mtp.norm.weight",
)
"""The names of Qwen."""
PARAMETERS = MtpNames(
    layer="mtp_head.transformer_layer.",
    embedding_norm="mtp_head.enorm.weight",
    state_norm="mtp_head.hnorm.weight",
    projection="mtp_head.eh_proj.weight",
    final_norm="mtp_head.final_layernorm.weight",
)
"""Megatron's names."""


def count(hf: Mapping[str, Any], *keys: str, default: int = 0) -> int:
    """Returns the number of layers for multi-token prediction by the first of `keys` that config.json has."""
    return next((hf[key] for key in keys if hf.get(key) is not None), default)


def tensors(names: MtpNames, a: Architecture, parts: tuple[LayerSpec, ...], norms: Mapping[str, str]) -> Shapes:
    """Returns the shape of each tensor of the checkpoint.

    Args:
        parts: attention and MLP of the layer.
        norms: Megatron's and the checkpoint's names of the layer's norms.
    """
    names = names.of(a)
    layer: Shapes = {}
    for part in parts:
        layer |= part.tensors(a)
    layer |= {f"{name}.weight": (a.hidden_size,) for name in norms.values()}
    return _around(names, a) | under(names.layer, layer)


def parameters(a: Architecture, shard: Shard, parts: tuple[LayerSpec, ...], norms: Mapping[str, str]) -> Shapes:
    """Returns the shape of each of Megatron's parameters on a rank with the output layer."""
    layer: Shapes = {}
    for part in parts:
        layer |= part.parameters(a, shard)
    layer |= {f"{name}.weight": (a.hidden_size,) for name in norms}
    return _around(PARAMETERS, a) | under(PARAMETERS.layer, layer)


def _around(names: MtpNames, a: Architecture) -> Shapes:
    return {
        names.embedding_norm: (a.hidden_size,),
        names.state_norm: (a.hidden_size,),
        names.projection: (a.hidden_size, 2 * a.hidden_size),
        names.final_norm: (a.hidden_size,),
    }


def load(
    held: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    names: MtpNames,
    a: Architecture,
    shard: Shard,
    parts: tuple[LayerSpec, ...],
    norms: Mapping[str, str],
) -> None:
    """Fills Megatron's parameters of the head."""
    names = names.of(a)
    for target, source in zip(PARAMETERS[1:], names[1:], strict=True):
        held[target].copy_(checkpoint[source])
    ours, theirs = Scope(held, PARAMETERS.layer), Scope(checkpoint, names.layer)
    for part in parts:
        part.load(ours, theirs, a, shard)
    for target, source in norms.items():
        ours[f"{target}.weight"].copy_(theirs[f"{source}.weight"])
