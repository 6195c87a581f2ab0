"""Products by oneDNN on a CPU against those of float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.cpu import products
from rlframe.megatron.cpu.products import BLOCK, by_blocks

pytestmark = [
    pytest.mark.later,
    pytest.mark.skipif(not products.is_faster(), reason="needs a processor with AVX-512, and oneDNN in torch"),
]

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, **options: Any) -> Tensor:
    """Returns normal numbers."""
    return torch.randn(*shape, generator=GENERATOR, **options)


def refused(first: Tensor, second: Tensor) -> Tensor:
    """Fails: the product should not have come here."""
    raise AssertionError(f"{tuple(first.shape)} by {tuple(second.shape)} was left to torch")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(normal(2 * BLOCK, 64), normal(64, 96), id="whole blocks of tokens"),
        pytest.param(normal(2 * BLOCK + 7, 64), normal(64, 96), id="tokens beyond the last block"),
        pytest.param(normal(BLOCK + 1, 2, 64), normal(64, 96), id="a batch of sequences"),
        pytest.param(normal(2 * BLOCK, 64), normal(96, 64).t(), id="a weight, transposed"),
        pytest.param(normal(2 * BLOCK + 7, 64).t(), normal(2 * BLOCK + 7, 96), id="the gradient of a weight"),
        pytest.param(normal(2 * BLOCK, 64).t(), normal(2 * BLOCK, 96), id="the same of whole blocks"),
        pytest.param(normal(BLOCK, 300), normal(96, 300).t(), id="a hidden size above the number of tokens"),
        pytest.param(normal(BLOCK + 7, 300).t(), normal(BLOCK + 7, 96), id="the gradient of a weight of that size"),
    ],
)
def test_a_product_is_that_of_float64(first: Tensor, second: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    own = products.onednn

    def contiguous(*given: Tensor) -> Tensor:
        """Refuses parts of rows, of which oneDNN computes one number at a time."""
        assert all(each.is_contiguous() or each.t().is_contiguous() for each in given)
        return own(*given)

    monkeypatch.setattr(products, "onednn", contiguous)
    with torch.no_grad():
        found = by_blocks(refused)(first, second)
    expected = first.double() @ second.double()
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(normal(8, 8), normal(8, 8), id="small"),
        pytest.param(normal(BLOCK - 1, 128), normal(128, 128), id="less than a block of tokens"),
        pytest.param(normal(BLOCK - 1, 300), normal(300, 128), id="less than a block, of a greater hidden size"),
        pytest.param(normal(BLOCK, 600)[:, :300], normal(300, 128), id="parts of rows"),
        pytest.param(normal(512, 64).bfloat16(), normal(64, 96).bfloat16(), id="bfloat16"),
        pytest.param(normal(512, 64), normal(64), id="by a vector"),
        pytest.param(normal(4, 256, 64), normal(4, 64, 96), id="a product for each of a batch"),
    ],
)
def test_other_products_are_torchs(first: Tensor, second: Tensor) -> None:
    with torch.no_grad(), pytest.raises(AssertionError, match="was left to torch"):
        by_blocks(refused)(first, second)


def test_what_is_differentiated_is_torchs() -> None:
    first, second = normal(512, 64, requires_grad=True), normal(64, 96)
    by_blocks(torch.matmul)(first, second).sum().backward()
    torch.testing.assert_close(first.grad, second.sum(1).expand(512, -1))
