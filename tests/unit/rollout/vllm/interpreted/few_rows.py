"""Products of few rows through Triton's interpreter, which tests/multiprocess/test_interpreted.py runs."""

import pytest
import torch

from rlframe.rollout.vllm.decode.few_rows import DEEP_NARROW, NARROW, ROWS, SMALLEST, WIDE, Tiles, multiply, tiles_for


@pytest.mark.parametrize("tiles", [NARROW, DEEP_NARROW, WIDE])
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
    ("columns", "depth", "tiles"),
    # The products of a 1.7 B's layer, one of few columns, and one whose inner dimension eight parts do not divide.
    [
        *((4096, 2048, NARROW), (2048, 2048, NARROW), (12288, 2048, WIDE), (2048, 6144, DEEP_NARROW)),
        *((100, 256, NARROW), (2048, 4352, NARROW), (4224, 4096, WIDE)),
    ],
)
def test_products_of_few_columns_have_narrow_tiles_and_deep_ones_more_parts(
    columns: int, depth: int, tiles: Tiles
) -> None:
    assert tiles_for(columns, depth, processors=132) is tiles
