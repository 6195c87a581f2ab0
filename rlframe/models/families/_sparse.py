"""Sparse attention of DeepSeek-V3.2 and of families derived from it: latent attention with an indexer."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families import _latent, _mtp, _sigmoid_router
from rlframe.models.families._attention import LatentAttention
from rlframe.models.families._decoder import Decoder
from rlframe.models.families._layer_specs import Scope, Shapes
from rlframe.models.families.base import Architecture, IndexerDimensions, Shard, faults_to_error

NEEDED = ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank")
LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention"}
"""Names of such a layer: of transformers 5.19, and of releases before it."""
NAMES = {
    "wq_b": "wq_b.weight",
    "wk": "wk.weight",
    "k_norm_weight": "k_norm.weight",
    "k_norm_bias": "k_norm.bias",
    "weights_proj": "weights_proj.weight",
}
"""Megatron's and Hugging Face's names of the tensors of an indexer."""


class SparseAttention(LatentAttention):
    """Latent attention and its indexer, which every tensor-parallel rank has whole."""

    def tensors(self, a: Architecture) -> Shapes:
        shapes = _indexer(a)
        return super().tensors(a) | {f"self_attn.indexer.{NAMES[name]}": shapes[name] for name in NAMES}

    def parameters(self, a: Architecture, shard: Shard) -> Shapes:
        shapes = _indexer(a)
        return super().parameters(a, shard) | {f"self_attention.indexer.{name}": shapes[name] for name in NAMES}

    def load(self, parameters: Scope, checkpoint: Scope, a: Architecture, shard: Shard) -> None:
        super().load(parameters, checkpoint, a, shard)
        for target, source in NAMES.items():
            parameters[f"self_attention.indexer.{target}"].copy_(checkpoint[f"self_attn.indexer.{source}"])


def _indexer(a: Architecture) -> Shapes:
    assert a.indexer is not None and a.latent is not None and a.latent.query_rank is not None
    heads, width = a.indexer.num_heads, a.indexer.head_dim
    return {
        "wq_b": (heads * width, a.latent.query_rank),
        "wk": (width, a.hidden_size),
        "k_norm_weight": (width,),
        "k_norm_bias": (width,),
        "weights_proj": (heads, a.hidden_size),
    }


class SparseDecoder(Decoder):
    """Latent attention with an indexer in every layer, groups of experts, and dense first layers."""

    attention = SparseAttention()
    rope_kinds = ("default", "yarn")
    mtp = _mtp.BEHIND_LAYERS
    default_groups = (1, 1)
    """Values of n_group and topk_group if config.json has none."""
    interleaved_indexer = False
    """Whether the indexer pairs neighbouring dimensions for its positions."""

    def _unsupported(self, hf: Mapping[str, Any]) -> list[str]:
        kinds = set(hf.get("layer_types") or ()) - LAYER_TYPES
        faults = [f"layer_types must be {' or '.join(sorted(LAYER_TYPES))}, got {min(kinds)!r:.60}"] if kinds else []
        return faults + super()._unsupported({**hf, "layer_types": None})

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        faults = [f"{key} is missing" for key in NEEDED if hf.get(key) is None]
        if hf.get("indexer_rope_interleave", self.interleaved_indexer) != self.interleaved_indexer:
            faults.append(f"indexer_rope_interleave must be {self.interleaved_indexer}, as transformers computes")
        faults_to_error(hf, faults)
        latent = _latent.features(hf)
        if hf["index_head_dim"] < latent["latent"].rotary_head_dim:
            faults_to_error(hf, [f"index_head_dim {hf['index_head_dim']} must be at least qk_rope_head_dim"])
        experts = _sigmoid_router.features(hf, default_groups=self.default_groups)
        indexer = IndexerDimensions(
            num_heads=hf["index_n_heads"],
            head_dim=hf["index_head_dim"],
            top_k=hf["index_topk"],
            interleaved=self.interleaved_indexer,
        )
        return experts | latent | {"indexer": indexer}
