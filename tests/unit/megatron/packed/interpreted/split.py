"""The GPU's sums of two calls of attention by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch

from rlframe.megatron.packed.split_attention import added, merged
from rlframe.megatron.packed.split_kernels import add_, merge_

READS = torch.tensor([False, True, True, False, True])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def error(dtype: torch.dtype) -> float:
    """Triton's interpreter cuts bfloat16 off, a GPU rounds."""
    return 2e-6 if dtype == torch.float32 else 2**-7


@DTYPES
@pytest.mark.parametrize(("heads", "width"), [(2, 16), (12, 24)])
def test_outputs_and_logarithms_are_merged_in_rows_that_read(dtype: torch.dtype, heads: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    out, other = (torch.randn(len(READS), heads, width, generator=generator).to(dtype) for _ in range(2))
    # Far apart too, where e to the power of either is no number.
    lse, other_lse = (100 * torch.randn(len(READS), heads, 1, generator=generator) for _ in range(2))
    other[~READS] = other_lse[~READS] = torch.nan
    expected = merged(out, lse, other, other_lse, READS)
    untouched = out[~READS].clone(), lse[~READS].clone()
    merge_(out, lse, other, other_lse, READS)
    torch.testing.assert_close(out, expected[0], atol=error(dtype), rtol=error(dtype))
    torch.testing.assert_close(lse, expected[1], atol=1e-5, rtol=1e-6)
    assert torch.equal(out[~READS], untouched[0]) and torch.equal(lse[~READS], untouched[1])


@DTYPES
@pytest.mark.parametrize("width", [16, 1100])
def test_gradients_are_added_in_rows_that_have_two(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values, others = (torch.randn(len(READS), 2, width, generator=generator).to(dtype) for _ in range(2))
    others[~READS] = torch.nan
    expected, untouched = added(values, others, READS), values[~READS].clone()
    add_(values, others, READS)
    torch.testing.assert_close(values, expected, atol=error(dtype), rtol=error(dtype))
    assert torch.equal(values[~READS], untouched)
