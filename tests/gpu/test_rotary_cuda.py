"""Norms and rotations of an engine's attention layers on a GPU, beside vLLM's own modules."""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.mark.parametrize("rows", [1, 8, 1000])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("query_heads", "key_heads", "size"), [(16, 8, 128), (14, 2, 64), (40, 8, 256)])
def test_queries_and_keys_are_those_of_vllms_modules(
    rows: int, normed: bool, query_heads: int, key_heads: int, size: int
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from rlframe.rollout.vllm.decode import rotary

    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(rows, (query_heads + 2 * key_heads) * size, device="cuda", generator=generator).bfloat16()
    positions = torch.randint(0, 4000, (rows,), device="cuda", generator=generator)
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        rope = get_rope(size, 4096, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, dtype=torch.bfloat16)
        norms = [RMSNorm(size, dtype=torch.bfloat16) for _ in range(2)] if normed else []
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    query, key, _ = qkv.split([query_heads * size, key_heads * size, key_heads * size], -1)
    if normed:
        query, key = (
            norm.forward_native(each.unflatten(1, (-1, size))).flatten(1)
            for norm, each in zip(norms, (query, key), strict=True)
        )
    expected = rope.forward_native(positions, query.contiguous(), key.contiguous())
    weights = [norm.weight for norm in norms] or [None, None]
    epsilon = norms[0].variance_epsilon if normed else 0.0
    found = torch.ops.rlframe.rotate(qkv, positions, rope.cos_sin_cache, *weights, query_heads, key_heads, epsilon)
    assert rotary.HEADS == 4
    for got, wanted in zip(found, expected, strict=True):
        # vLLM's modules round between norm and rotation.
        torch.testing.assert_close(got, wanted, atol=0.04, rtol=2**-6)
