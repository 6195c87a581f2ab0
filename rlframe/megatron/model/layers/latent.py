"""The epsilon of the norms within latent attention."""

from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

NORMS = {"q_layernorm": "linear_q_up_proj", "kv_layernorm": "linear_kv_up_proj"}
"""The norms of the narrow vectors, and the projections with which Transformer Engine fuses them."""


def set_latent_epsilon(model: nn.Module, epsilon: float) -> None:
    """Gives the norms of the narrow vectors their epsilon. Megatron-Core has one for all norms."""
    for attention in model.modules():
        if not isinstance(attention, MLASelfAttention):
            continue
        for norm, projection in NORMS.items():
            # Without a narrow vector for queries there is neither.
            owners = [part for name in (norm, projection) if (part := getattr(attention, name, None)) is not None]
            found = [part for part in owners if hasattr(part, "eps")]
            assert len(found) == bool(owners), f"{norm} of this Megatron-Core keeps its epsilon elsewhere"
            for part in found:
                part.eps = epsilon
