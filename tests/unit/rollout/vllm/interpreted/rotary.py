"""Norms and rotations through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rlframe.rollout.vllm.decode.rotary import rotate

ROWS, SIZE, EPSILON = 5, 64, 1e-5


def expected(heads: Tensor, norm: Tensor | None, angles: Tensor) -> Tensor:
    """[B, H * D] what layers of Llama (without norms) and Qwen 3 do to their queries or keys [B, H, D]: halves of a
    head are rotated against each other."""
    if norm is not None:
        heads = rms_norm(heads, (SIZE,), norm, EPSILON)
    cos, sin = angles[:, None].chunk(2, -1)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1)


@pytest.mark.parametrize("normed", [False, True])
# Programs of four heads: some with queries and keys, and some that are not full.
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 2), (5, 1), (16, 8)])
def test_queries_and_keys_are_normed_and_rotated_by_their_positions(
    query_heads: int, key_heads: int, normed: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = (query_heads + 2 * key_heads) * SIZE
    # Rows lie apart, as those of a part of a tensor.
    qkv = torch.randn(ROWS, whole + 3, generator=generator)[:, :whole]
    positions, angles = torch.tensor([3, 1, 0, 7, 9]), torch.randn(10, SIZE, generator=generator)
    norms = [torch.rand(SIZE, generator=generator) if normed else None for _ in range(2)]
    found = rotate(qkv, positions, angles, *norms, query_heads, key_heads, EPSILON)
    heads = qkv.unflatten(1, (-1, SIZE)).split([query_heads, key_heads, key_heads], 1)
    for got, each, norm in zip(found, heads[:2], norms, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected(each, norm, angles[positions]), atol=1e-5, rtol=1e-5)


def test_a_step_without_rows_has_no_queries() -> None:
    query, key = rotate(
        torch.empty(0, 4 * SIZE), torch.empty(0, dtype=torch.int64), torch.ones(1, SIZE), None, None, 2, 1, 0.0
    )
    assert query.shape == (0, 2 * SIZE) and key.shape == (0, SIZE)
