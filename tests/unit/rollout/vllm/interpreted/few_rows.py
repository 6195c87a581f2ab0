"""Products of few rows through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import pytest
import torch

from rlframe.rollout.vllm.decode.few_rows import ALONE, NARROW, ROWS, SMALLEST, WIDE, Tiles, multiply, tiles_for


@pytest.mark.parametrize("tiles", [ALONE, NARROW, WIDE])
@pytest.mark.parametrize(("rows", "with_bias"), [(1, False), (5, True), (ROWS, False)])
def test_a_product_of_few_rows_is_torchs(tiles: Tiles, rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    # The last program has fewer columns than the others. Rows lie apart, as those of a part of a tensor.
    weight = torch.randn(tiles.columns + 7, 2 * SMALLEST, generator=generator).half()
    x = torch.randn(rows, 3 * SMALLEST, generator=generator).half()[:, : 2 * SMALLEST]
    bias = torch.randn(len(weight), generator=generator).half() if with_bias else None
    expected = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    found = multiply(x, weight, bias, tiles, dependent=False)
    assert found.shape == expected.shape and found.is_contiguous()
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("columns", "tiles"),
    [(100, ALONE), (132 * 16, ALONE), (132 * 16 + 1, NARROW), (132 * 48, NARROW), (132 * 48 + 1, WIDE), (12288, WIDE)],
)
def test_products_of_few_columns_have_narrow_tiles_and_multiprocessors_for_themselves(
    columns: int, tiles: Tiles
) -> None:
    assert tiles_for(columns, processors=132) is tiles
