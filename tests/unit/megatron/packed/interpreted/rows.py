"""The GPU's sums of rows by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch

from rlframe.megatron.packed import row_kernels
from rlframe.megatron.packed.bounds import bounds_of

ROWS, KEYS = 7, [0, 1, 2, 0, 1, 4, 0, 1, 5, 6]
"""Row 3 has no reader."""


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_has_the_sum_of_its_readers(monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(row_kernels, "BLOCK", block)
    keys = torch.tensor(KEYS)
    values = torch.randn(3, len(KEYS), 11, generator=torch.Generator().manual_seed(0)).to(dtype).permute(1, 2, 0)
    readers, starts = torch.argsort(keys, stable=True).int(), bounds_of(torch.bincount(keys, minlength=ROWS))
    sums = row_kernels.row_sums(values, readers, starts)
    expected = torch.zeros(ROWS, 11, 3).index_add_(0, keys, values.float())
    assert sums.dtype == dtype and sums.shape == expected.shape
    # Triton's interpreter cuts bfloat16 off, a GPU rounds.
    torch.testing.assert_close(sums.float(), expected, atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 2**-7)


def test_no_rows_have_no_sums() -> None:
    nothing = torch.empty(0, 4)
    assert row_kernels.row_sums(
        nothing, torch.empty(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    ).shape == (0, 4)
