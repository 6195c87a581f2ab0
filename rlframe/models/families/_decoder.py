"""The decoder that all families share: layers of RMSNorm, attention, RMSNorm, and a gated MLP or experts."""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlframe.models.config import HEAD
from rlframe.models.families import _fields, _mtp, _rope
from rlframe.models.families._attention import GroupedAttention
from rlframe.models.families._layer_specs import LayerSpec, Scope, Shapes, under
from rlframe.models.families._mlp import Experts, Mlp
from rlframe.models.families._mtp import MtpNames
from rlframe.models.families.base import Architecture, Family, Shard, faults_to_error
from rlframe.models.quantized import stated


class Decoder(Family):
    """Base of the families whose checkpoints use the names of Llama. A family supplies its parts and its features."""

    norms: Mapping[str, str] = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    """Megatron's and Hugging Face's names of the norms of a layer, in width H."""
    attention: LayerSpec = GroupedAttention()
    gated_delta_net: LayerSpec | None = None
    """The attention of the layers in `Architecture.gated_delta_layers`. None if the family has no such layers."""
    mlp: LayerSpec = Mlp()
    """The MLP of the layers that are not in `Architecture.moe_layers`."""
    experts: LayerSpec = Experts()
    """The experts of the layers in `Architecture.moe_layers`."""
    default_theta = 10000.0
    """Value of rope_theta if config.json has none."""
    default_kv_heads: int | None = None
    """Value of num_key_value_heads if config.json has none. None for num_attention_heads, which null means too."""
    default_tie = False
    """Value of tie_word_embeddings if config.json has none."""
    default_rope: Mapping[str, Any] = MappingProxyType({})
    """The rope_parameters if config.json has none, nor a rope_scaling."""
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial_rope = False
    """Whether the family reads partial_rotary_factor."""
    default_partial = 1.0
    """Value of partial_rotary_factor if config.json has none."""
    attention_bias = False
    """Whether the family reads attention_bias."""
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    """The values of layer_types that the family knows."""
    windows = False
    """Whether the family reads sliding_window, and those that have it layer_types."""
    mtp: MtpNames | None = None
    """The checkpoint's names of the head for multi-token prediction. None if the family has none."""

    @abstractmethod
    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of `Architecture` in which this family differs from Llama."""

    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        faults_to_error(hf, _fields.faults(hf, required=_REQUIRED))
        heads = hf["num_attention_heads"]
        if not hf.get("head_dim") and hf["hidden_size"] % heads:
            faults_to_error(hf, [f"num_attention_heads {heads} must divide hidden_size {hf['hidden_size']}"])
        rope = _rope.read(
            hf,
            default_theta=self.default_theta,
            kinds=self.rope_kinds,
            partial=self.partial_rope,
            default_partial=self.default_partial,
            default=self.default_rope,
        )
        faults_to_error(hf, self._unsupported(hf) + rope.faults)
        fields = {
            "model_type": hf["model_type"],
            "hidden_size": hf["hidden_size"],
            "num_layers": hf["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_kv_heads": hf.get("num_key_value_heads", self.default_kv_heads) or heads,
            "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
            "ffn_hidden_size": hf["intermediate_size"],
            "vocab_size": hf["vocab_size"],
            "max_positions": hf["max_position_embeddings"],
            "rms_norm_eps": hf["rms_norm_eps"],
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "rotary_percent": rope.percent,
            "tie_embeddings": self.default_tie if (tie := hf.get("tie_word_embeddings")) is None else tie,
            "moe_layers": (False,) * hf["num_hidden_layers"],
        }
        found = Architecture(**(fields | self.features(hf)))
        faults_to_error(hf, _contradictions(found))
        return found

    def _unsupported(self, hf: Mapping[str, Any]) -> list[str]:
        """Returns the settings of config.json that this family would silently compute wrongly."""
        faults = []
        if unknown := set(hf.get("layer_types") or ()) - {*self.layer_kinds}:
            faults.append(f"layer_types must be {' or '.join(self.layer_kinds)}, got {min(unknown)!r:.60}")
        if not self.windows and (hf.get("use_sliding_window") or "sliding_attention" in (hf.get("layer_types") or ())):
            faults.append("a sliding window is in use, which is not supported: set use_sliding_window to false")
        refused = ("mlp_bias",) if self.attention_bias else ("attention_bias", "mlp_bias")
        faults += [f"{key} is true, which is not supported" for key in refused if hf.get(key)]
        if not hf.get("is_causal", True):
            faults.append("is_causal is false: the model is an encoder")
        if hf.get("hidden_act", "silu") != "silu":
            faults.append(f"hidden_act must be silu, got {hf['hidden_act']!r}")
        return faults + stated.faults(hf)

    def parts(self, a: Architecture, layer: int) -> tuple[LayerSpec, LayerSpec]:
        """Returns the attention of layer number `layer`, and its MLP or experts."""
        attention = self.attention
        if a.has_gated_delta_net(layer):
            assert self.gated_delta_net is not None
            attention = self.gated_delta_net
        return attention, self.experts if a.moe_layers[layer] else self.mlp

    def tensors(self, architecture: Architecture) -> Shapes:
        a = architecture
        shapes: Shapes = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
        for layer in range(a.num_layers):
            attention, mlp = self.parts(a, layer)
            own = attention.tensors(a) | mlp.tensors(a)
            own |= {f"{name}.weight": (a.hidden_size,) for name in self.norms.values()}
            shapes |= under(f"model.layers.{layer}.", own)
        shapes["model.norm.weight"] = (a.hidden_size,)
        if a.num_outputs:
            shapes[HEAD] = (a.num_outputs, a.hidden_size)
        elif a.num_outputs is None and not a.tie_embeddings:
            shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
        if a.with_mtp and self.mtp:
            shapes |= _mtp.tensors(self.mtp, a, self.parts(a, a.layer_of_mtp), self.norms)
        return shapes

    def parameters(self, architecture: Architecture, shard: Shard) -> Shapes:
        a = architecture
        vocabulary = (shard.padded_vocab_size // shard.tp_size, a.hidden_size)
        shapes: Shapes = {}
        if shard.has_embedding:
            shapes["embedding.word_embeddings.weight"] = vocabulary
        for layer in range(shard.num_layers):
            attention, mlp = self.parts(a, shard.first_layer + layer)
            own = attention.parameters(a, shard) | mlp.parameters(a, shard)
            own |= {f"{name}.weight": (a.hidden_size,) for name in self.norms}
            shapes |= under(f"decoder.layers.{layer}.", own)
        if shard.has_output:
            shapes["decoder.final_layernorm.weight"] = (a.hidden_size,)
            if a.num_outputs:
                shapes["output_layer.weight"] = (a.num_outputs, a.hidden_size)
            elif a.num_outputs is None and not (a.tie_embeddings and shard.has_embedding):
                shapes["output_layer.weight"] = vocabulary
            if a.with_mtp and self.mtp:
                shapes |= _mtp.parameters(a, shard, self.parts(a, a.layer_of_mtp), self.norms)
        return shapes

    def load(
        self,
        parameters: Mapping[str, Tensor],
        checkpoint: Mapping[str, Tensor],
        architecture: Architecture,
        shard: Shard,
    ) -> None:
        if shard.has_embedding:
            _load_vocabulary(
                parameters["embedding.word_embeddings.weight"], checkpoint["model.embed_tokens.weight"], shard
            )
        for layer in range(shard.num_layers):
            number = shard.first_layer + layer
            ours, theirs = Scope(parameters, f"decoder.layers.{layer}."), Scope(checkpoint, f"model.layers.{number}.")
            for part in self.parts(architecture, number):
                part.load(ours, theirs, architecture, shard)
            for target, source in self.norms.items():
                ours[f"{target}.weight"].copy_(theirs[f"{source}.weight"])
        if shard.has_output:
            parameters["decoder.final_layernorm.weight"].copy_(checkpoint["model.norm.weight"])
        if architecture.num_outputs and shard.has_output:
            # Replicated on all tensor-parallel ranks.
            parameters["output_layer.weight"].copy_(checkpoint[HEAD])
        # Tied embeddings: on one stage Megatron has no output parameter; on several, the last stage holds a copy.
        elif "output_layer.weight" in parameters:
            head = "model.embed_tokens.weight" if architecture.tie_embeddings else "lm_head.weight"
            _load_vocabulary(parameters["output_layer.weight"], checkpoint[head], shard)
        if architecture.with_mtp and self.mtp and shard.has_output:
            parts = self.parts(architecture, architecture.layer_of_mtp)
            _mtp.load(parameters, checkpoint, self.mtp, architecture, shard, parts, self.norms)


_REQUIRED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def _contradictions(a: Architecture) -> list[str]:
    """Returns contradictions between values that are valid on their own."""
    heads, groups = a.num_attention_heads, a.num_kv_heads
    most_experts = MOST_TENSORS // a.num_layers
    rules = [
        (heads % groups == 0, f"num_key_value_heads {groups} must divide num_attention_heads {heads}"),
        (
            not a.num_experts or 1 <= a.experts_per_token <= a.num_experts,
            f"num_experts_per_tok must be from 1 to the {a.num_experts} experts, got {a.experts_per_token}",
        ),
        (
            a.experts_per_token != 1 or a.sigmoid_router or not a.norm_topk_prob,
            "num_experts_per_tok must be at least 2: Megatron-Core 0.16.1 has no softmax over one score",
        ),
        (
            a.router_groups_per_token <= a.router_groups,
            f"topk_group must be at most n_group {a.router_groups}, got {a.router_groups_per_token}",
        ),
        (
            max(len(a.window_layers), len(a.gated_delta_layers)) in (0, a.num_layers),
            f"layer_types must name {a.num_layers} layers, as num_hidden_layers says, got "
            f"{max(len(a.window_layers), len(a.gated_delta_layers))}",
        ),
        (
            len(a.chunk_layers) in (0, a.num_layers),
            f"layer_types must name {a.num_layers} layers, as num_hidden_layers says, got {len(a.chunk_layers)}",
        ),
        (
            len(a.no_rope_layers) in (0, a.num_layers),
            f"no_rope_layers must name {a.num_layers} layers, as num_hidden_layers says, got {len(a.no_rope_layers)}",
        ),
        (
            a.num_experts <= most_experts,
            f"num_hidden_layers {a.num_layers} * {a.num_experts} experts must be at most {MOST_TENSORS}",
        ),
    ]
    return [fault for holds, fault in rules if not holds]


MOST_TENSORS = 500_000
"""Greatest number of experts of all layers together. DeepSeek-V3 has 14,848."""


def _load_vocabulary(parameter: Tensor, tensor: Tensor, shard: Shard) -> None:
    """Fills the rows of the padded vocabulary. Rows beyond the real vocabulary are zeroed."""
    rows = shard.padded_vocab_size // shard.tp_size
    first = min(shard.tp_rank * rows, tensor.shape[0])
    present = min(rows, tensor.shape[0] - first)
    parameter[:present].copy_(tensor[first : first + present])
    if present < rows:
        parameter[present:].zero_()
