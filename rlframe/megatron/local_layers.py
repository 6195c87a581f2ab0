"""Modules of our own in Megatron's layers: what only some families need."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from rlframe.models.families.base import ClampedGlu


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with whole projections into the latent vectors on every rank.

    Megatron-Core 0.16.1 has them whole with Transformer Engine, and cuts them by tensor parallelism with the local
    layers; one layout for both is what families load into.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        latent = self.config
        if latent.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, latent.q_lora_rank)
        width = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width)


class WholeLinear(torch.nn.Module):
    """A projection that every tensor-parallel rank applies whole to its part of the tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        config.init_method(self.weight)
        # By this mark Megatron adds up the gradients of the ranks that each saw a slice of the tokens.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """[..., outputs] and no bias, as Megatron's linear layers answer."""
        return F.linear(hidden, self.weight), None


def clamped_glu(glu: ClampedGlu) -> type[torch.nn.Module]:
    """The activation as a module that Megatron can build."""

    class Activation(torch.nn.Module):
        """Source: GPT-OSS's reference (openai/gpt-oss, gpt_oss/torch/model.py, swiglu)."""

        def __init__(self, config: TransformerConfig):
            super().__init__()

        def forward(self, both: Tensor) -> Tensor:
            """[..., F] from [..., 2 F], where gate and up take turns."""
            gate = both[..., ::2].clamp(max=glu.limit)
            up = both[..., 1::2].clamp(min=-glu.limit, max=glu.limit)
            return (up + 1) * gate * torch.sigmoid(glu.alpha * gate)

    return Activation
