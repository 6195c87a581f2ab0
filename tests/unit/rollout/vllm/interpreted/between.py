"""Norms and gates of many rows through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from rlframe.rollout.vllm.decode.between.rows import add_norm, gated


@pytest.mark.parametrize("columns", [96, 512])
def test_a_sum_is_kept_and_normed(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, columns, generator=generator)
    weight = torch.rand(columns, generator=generator) + 0.5
    normed, added = add_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(added, x + residual)
    torch.testing.assert_close(normed, rms_norm(x + residual, (columns,), weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("columns", [96, 1024, 1500])
def test_the_second_half_is_gated_by_the_first(columns: int) -> None:
    x = torch.randn(3, 2 * columns, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(gated(x), silu(gate) * up, atol=1e-5, rtol=1e-5)
