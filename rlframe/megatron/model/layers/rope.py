"""Rotary positions that Megatron does not have: those that differ between layers, and other numbers of Llama 3's
scaling."""

import copy
import math
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rlframe.models.families.base import Architecture

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The numbers of Llama 3.1 and later, which Megatron fixes."""


def set_rope(model: GPTModel, architecture: Architecture) -> None:
    """Gives the model the positions that its arguments cannot describe."""
    scaling = architecture.rope_scaling or {}
    if scaling.get("rope_type") == "llama3" and not scaling.items() >= LLAMA3.items():
        model.rotary_pos_emb.inv_freq = scaled_frequencies(model.rotary_pos_emb.inv_freq, **scaling)
    if architecture.window_rope_theta is not None:
        model.rotary_pos_emb = RopeByLayer(model.rotary_pos_emb, model.config, theta=architecture.window_rope_theta)


def scaled_frequencies(
    frequencies: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    **_: str,
) -> Tensor:
    """Returns [head_dim / 2] frequencies of which the long waves are divided by `factor` (Llama 3, arXiv 2407.21783).

    Waves shorter than the original positions over high_freq_factor stay, those longer than the positions over
    low_freq_factor are divided, and those between are mixed. The two bounds may be one.
    """
    waves = original_max_position_embeddings * frequencies / (2 * math.pi)
    between = (waves - low_freq_factor) / max(high_freq_factor - low_freq_factor, 1e-30)
    kept = between.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class RopeByLayer(torch.nn.Module):
    """Megatron's angles of the layers without a window, and with them those of the layers with one."""

    def __init__(self, rope: Any, config: TransformerConfig, *, theta: float):
        super().__init__()
        self.rope = rope
        self.window_rope = RotaryEmbedding(
            kv_channels=config.kv_channels,
            rotary_percent=1.0,
            rotary_base=theta,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=rope.cp_group,
        )
        self.get_rotary_seq_len = rope.get_rotary_seq_len

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Returns [2, longest sequence, 1, 1, head_dim], of which `AttentionOfLayer` takes one; with yarn's factor if
        Megatron's own returns it."""
        angles, of_windows = self.rope(*arguments, **options), self.window_rope(*arguments, **options)
        if isinstance(angles, tuple):
            return torch.stack([angles[0], of_windows]), angles[1]
        return torch.stack([angles, of_windows])


class AttentionOfLayer(SelfAttention):
    """Self-attention that takes its layer's angles out of those of `RopeByLayer`, and has norms of query and key heads
    only if its layer has them."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *,
        architecture: Architecture,
        **options: Any,
    ):
        index, has_two = layer_number - 1, architecture.window_rope_theta is not None
        choice = int(architecture.window_layers[index]) if has_two else None
        if choice and hasattr(config, "yarn_rotary_scaling_factor"):
            # Megatron multiplies cosines and sines by yarn's factor wherever the configuration has one.
            config = copy.copy(config)
            del config.yarn_rotary_scaling_factor
        super().__init__(config, submodules, layer_number, **options)
        self.choice = choice
        if architecture.qk_l2_norm and architecture.no_rope_layers and architecture.no_rope_layers[index]:
            self.q_layernorm = self.k_layernorm = None

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> Any:
        """Returns the attention's output and its bias."""
        if rotary_pos_emb is not None and self.choice is not None:
            rotary_pos_emb = rotary_pos_emb[self.choice]
        return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb, **options)
