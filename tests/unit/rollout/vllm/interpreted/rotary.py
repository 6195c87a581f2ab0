"""Norms and rotations through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import pytest
import torch

from rlframe.rollout.vllm.decode.rotary import rotate
from tests.unit.rollout.vllm.interpreted.formulas import normed_and_rotated

ROWS, SIZE, EPSILON = 5, 64, 1e-5


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
    arguments = (qkv, positions, angles, *norms, query_heads, key_heads, EPSILON)
    for found, expected in zip(rotate(*arguments), normed_and_rotated(*arguments), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_step_without_rows_has_no_queries() -> None:
    query, key = rotate(
        torch.empty(0, 4 * SIZE), torch.empty(0, dtype=torch.int64), torch.ones(1, SIZE), None, None, 2, 1, 0.0
    )
    assert query.shape == (0, 2 * SIZE) and key.shape == (0, SIZE)
