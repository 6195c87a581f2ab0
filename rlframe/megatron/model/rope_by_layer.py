"""Rotary positions that differ between layers with a window and layers without."""

import copy
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


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
    """Self-attention that takes its layer's angles out of those of `RopeByLayer`."""

    def __init__(self, config: TransformerConfig, *arguments: Any, windows: tuple[bool, ...], **options: Any):
        super().__init__(config, *arguments, **options)
        self.windowed = windows[self.layer_number - 1]
        if self.windowed and hasattr(config, "yarn_rotary_scaling_factor"):
            # Megatron multiplies cosines and sines by yarn's factor wherever the configuration has one.
            self.config = copy.copy(config)
            del self.config.yarn_rotary_scaling_factor

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor | None = None, **options: Any) -> Any:
        """Returns the attention's output and its bias."""
        angles = None if rotary_pos_emb is None else rotary_pos_emb[int(self.windowed)]
        return super().forward(*arguments, rotary_pos_emb=angles, **options)
