"""The GPU's order of tokens by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from rlframe.megatron.model.layers.experts import order, order_kernels

TOKENS, CHOICES, WIDTH = 7, 4, 37


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_kernels, "WIDEST", 16)


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and choices. One token has made none, and one choice nobody."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TOKENS, WIDTH, generator=generator)
    weights = torch.rand(TOKENS, CHOICES, generator=generator)
    chosen = torch.rand(TOKENS, CHOICES, generator=generator) < 0.6
    chosen[2], chosen[:, 1] = False, False
    return rows.requires_grad_(), weights.requires_grad_(), chosen


def spread_and_back(module: ModuleType, *, room: int) -> list[Tensor]:
    """Returns copies, their weights, sums of other rows, and gradients of all three."""
    rows, weights, chosen = drawn()
    places = order.places(chosen)
    count = int(chosen.sum())
    out, of_out = module.spread(rows, weights, places, room)
    factors = torch.arange(count, dtype=torch.float32)
    summed = module.gathered(out[:count] * factors[:, None], places)
    (summed.square().sum() + (of_out[:count] * factors).sum()).backward()
    assert rows.grad is not None
    assert weights.grad is not None
    return [out[:count], of_out[:count], summed, rows.grad, weights.grad]


@pytest.mark.parametrize("room", [0, 5])
def test_kernels_do_what_torch_does(room: int) -> None:
    """More room than rows is allowed."""
    count = int(drawn()[2].sum())
    results = [spread_and_back(module, room=count + room) for module in (order, order_kernels)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours)


def test_a_row_has_its_own_place() -> None:
    """Places of one column may be in any order."""
    rows = drawn()[0].detach()
    places = torch.tensor([3, -1, 0, 4, 2, -1, 1], dtype=torch.int32)[:, None]
    for module in (order, order_kernels):
        out, weights = module.spread(rows, None, places, 5)
        torch.testing.assert_close(out, rows[[2, 6, 4, 0, 3]])
        assert weights is None


def test_sums_are_float32_inside() -> None:
    """In float16 4,096 and three times 1 would stay 4,096."""
    rows = torch.tensor([[4096.0], [1.0], [1.0], [2.0]]).half()
    places = torch.arange(4, dtype=torch.int32)[None]
    assert order_kernels.gathered(rows, places).item() == 4100


def test_the_first_choice_comes_first() -> None:
    chosen = torch.tensor([[True, False], [True, True], [False, True]])
    assert order.places(chosen).tolist() == [[0, -1], [1, 2], [-1, 3]]
