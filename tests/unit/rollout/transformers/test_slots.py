"""The memory of keys and values against attention over whole sequences."""

import pytest
import torch
import torch.nn.functional as F

from rlframe.rollout.transformers.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_may_be_narrower_than_keys(dtype: torch.dtype) -> None:
    # Latent attention: keys of width 6, values of width 4. Four tokens at once, then one.
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 5, width, generator=generator, dtype=dtype)
        for heads, width in ((4, 6), (2, 6), (2, 4))
    )  # fmt: skip
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4, enable_gqa=True)
    expected = whole.transpose(1, 2).flatten(2)

    slots = KVCache(num_slots=1, width=8, device=torch.device("cpu"))
    slots.prefill(slots=torch.tensor([0]), prompts=torch.tensor([0]))
    first = slots.attention(0, query[:, :, :4], key[:, :, :4], value[:, :, :4], scale=0.4)
    slots.decode(torch.tensor([4]), used=5, dtype=dtype)
    last = slots.attention(0, query[:, :, 4:], key[:, :, 4:], value[:, :, 4:], scale=0.4)
    torch.testing.assert_close(torch.cat([first, last], dim=1), expected)
