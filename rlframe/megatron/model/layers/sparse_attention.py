"""Sparse attention: an indexer chooses the keys that each query of latent attention sees.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1), computed as in transformers' DeepseekV32Indexer, in plain PyTorch
on every device. Megatron-Core 0.16.1 has a sparse attention that takes no packed sequences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig
from torch import Tensor

from rlframe.megatron.compat import LatentAttention
from rlframe.megatron.cpu.attention import Grid, layout_of, rotate
from rlframe.megatron.packed.context_parallel import positions_of_rank
from rlframe.models.families.base import IndexerDimensions

NORM_EPS = 1e-6
MOST_SCORES = 1 << 26
"""Greatest number of scores of single heads that are in memory at once."""


class SparseLatentAttention(LatentAttention):
    """Latent attention in which a query sees the keys that the indexer ranks highest.

    The choice is kept with the micro-batch, because recomputation of another micro-batch may come between.
    """

    def __init__(
        self, config: MLATransformerConfig, *arguments: Any, indexer: IndexerDimensions, **keywords: Any
    ) -> None:
        super().__init__(config, *arguments, **keywords)
        self.indexer = Indexer(config, indexer)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **keywords: Any,
    ) -> Any:
        """Returns what Megatron's own does, and notes the chosen keys for `PackedAttention`."""
        assert packed_seq_params is not None
        found = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **keywords
        )
        if packed_seq_params.max_seqlen_q > self.indexer.shape.top_k:
            if not hasattr(packed_seq_params, "chosen"):
                packed_seq_params.chosen = {}
            # A head for multi-token prediction, and a teacher, have layers of the same numbers.
            packed_seq_params.chosen[self.core_attention] = self._choose(hidden_states, found[3], packed_seq_params)
        return found

    @torch.no_grad()
    def _choose(self, hidden: Tensor, narrow: Tensor, packing: PackedSeqParams) -> list[Tensor | None]:
        """Returns the keys that each query sees, by grid of the packed sequences."""
        weight = getattr(self.linear_q_up_proj, "layer_norm_weight", None)
        if weight is not None:
            # Transformer Engine normalises within the projection.
            epsilon = self.linear_q_up_proj.eps
            narrow = F.rms_norm(narrow.float(), weight.shape, weight.float(), epsilon).to(narrow.dtype)
        longest = int(packing.max_seqlen_q)
        if self.config.rope_type == "rope":
            angles, factor = self.rotary_pos_emb(longest, packed_seq=True), 1.0
        else:
            angles, factor = self.rotary_pos_emb(longest, packed_seq=True)
        bounds = packing.cu_seqlens_q
        angles = angles[positions_of_rank(bounds, 1, 0)][:, 0, :, : angles.shape[-1] // 2]
        positions = (angles.cos() * factor).to(hidden.dtype), (angles.sin() * factor).to(hidden.dtype)
        return self.indexer.visible(hidden.squeeze(1), narrow, positions, layout_of(packing).grids)


class Indexer(torch.nn.Module):
    """Ranks keys for queries by a score of few narrow heads.

    It is not trained: no gradient reaches it through the choice, in transformers too. Its weights are buffers, which
    export, weight sync and checkpoints have.
    """

    def __init__(self, config: MLATransformerConfig, shape: IndexerDimensions):
        super().__init__()
        self.shape, self.rotary = shape, config.qk_pos_emb_head_dim
        self.parallel = config.sequence_parallel
        width, heads, rank = shape.head_dim, shape.num_heads, config.q_lora_rank
        for name, size, dtype in (
            ("wq_b", (heads * width, rank), config.params_dtype),
            ("wk", (width, config.hidden_size), config.params_dtype),
            ("k_norm_weight", (width,), torch.float32),
            ("k_norm_bias", (width,), torch.float32),
            ("weights_proj", (heads, config.hidden_size), torch.float32),
        ):
            self.register_buffer(name, torch.zeros(size, dtype=dtype))

    def visible(
        self, hidden: Tensor, narrow: Tensor, positions: tuple[Tensor, Tensor], grids: list[Grid]
    ) -> list[Tensor | None]:
        """Returns [S, 1, Q, K] for each grid, True where the query sees the key; None where it sees all before it.

        Args:
            hidden: [T / tp, H] this rank's part of the layer's normalised input.
            narrow: [T / tp, query rank] the normalised vectors that queries come from.
            positions: cosines and sines [T, 1, rotary dims / 2].
        """
        keys = F.linear(hidden, self.wk.to(hidden.dtype)).float()
        keys = F.layer_norm(keys, self.k_norm_weight.shape, self.k_norm_weight, self.k_norm_bias, NORM_EPS)
        weights = F.linear(hidden.float(), self.weights_proj) * self.shape.num_heads**-0.5
        keys, weights, narrow = (self._whole(each) for each in (keys.to(hidden.dtype), weights, narrow))
        queries = F.linear(narrow, self.wq_b.to(narrow.dtype)).unflatten(-1, (self.shape.num_heads, -1))
        queries = self._rotated(queries, positions).float()
        keys = self._rotated(keys[:, None], positions)[:, 0].float()
        return [
            self._of_grid(queries[grid.query_rows], keys[grid.key_rows], weights[grid.query_rows])
            if grid.key_rows.shape[1] > self.shape.top_k
            else None
            for grid in grids
        ]

    def _whole(self, rows: Tensor) -> Tensor:
        """Returns the rows of all ranks of sequence parallelism."""
        return gather_from_sequence_parallel_region(rows) if self.parallel else rows

    def _rotated(self, heads: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Returns [T, heads, D] with positions in the first dimensions of each head. The order of the results does not
        matter, because queries and keys have the same; which dimensions are paired does."""
        first, rest = heads[..., : self.rotary], heads[..., self.rotary :]
        if self.shape.interleaved:
            first = torch.cat([first[..., ::2], first[..., 1::2]], dim=-1)
        return torch.cat([rotate(first, *positions), rest], dim=-1)

    def _of_grid(self, queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        """Returns [S, 1, Q, K], from queries [S, Q, heads, D], keys [S, K, D] and weights [S, Q, heads]."""
        sequences, positions, heads, _ = queries.shape
        step = max(1, MOST_SCORES // (sequences * heads * keys.shape[1]))
        places = torch.arange(keys.shape[1], device=keys.device)
        pieces = []
        for first in range(0, positions, step):
            part = slice(first, first + step)
            scores = torch.einsum("sqhd,skd->sqhk", queries[:, part], keys) * self.shape.head_dim**-0.5
            ranking = torch.einsum("sqh,sqhk->sqk", weights[:, part], scores.relu_())
            before = places <= places[part, None]
            pieces.append(greatest(ranking.masked_fill_(~before, -torch.inf), self.shape.top_k) & before)
        return torch.cat(pieces, dim=1)[:, None]


def greatest(ranking: Tensor, count: int) -> Tensor:
    """Returns [..., K] True at the `count` greatest of each row; the first ones where some are equal.

    Scores of keys that no head looks at are exactly 0, and which of those `topk` takes depends on the other sequences
    of a micro-batch.
    """
    least = ranking.topk(count, dim=-1).values[..., -1:]
    above, equal = ranking > least, ranking == least
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= count - above.sum(-1, keepdim=True)))
