"""The GPU's gradients of experts' weights by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.model.layers.experts import gradients
from rlframe.megatron.model.layers.experts.gradients import add_gradients, by_one_kernel, taken
from rlframe.megatron.model.layers.experts.stacked import stacked

COUNTS = [0, 3, 40, 16, 0, 1, 0]
"""Tokens of each expert: fewer and more than a program reads at once."""
INPUTS, OUTPUTS = 32, 48


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS", "TOKENS"):
        monkeypatch.setattr(gradients, name, 16)
    monkeypatch.setattr(gradients, "REDUCES", False)


def drawn(*, backwards: bool = True) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Inputs, gradients from above, and sums of gradients that there are already."""
    generator = torch.Generator().manual_seed(0)
    # Triton's interpreter multiplies no bfloat16.
    inputs, above = (torch.randn(sum(COUNTS), width, generator=generator).half() for width in (INPUTS, OUTPUTS))
    sums = list(torch.randn(len(COUNTS), OUTPUTS, INPUTS, generator=generator))
    return inputs, above, sums[::-1] if backwards else sums


def copied(sums: list[Tensor]) -> list[Tensor]:
    """The same in other memory, in the order of Megatron's buffer."""
    return list(torch.stack(sums[::-1]))[::-1]


def add(inputs: Tensor, above: Tensor, sums: list[Tensor], *, adds: bool = True) -> None:
    held = stacked(sums)
    assert held
    add_gradients(inputs, above, held, tuple(COUNTS), adds=adds)


def expected(inputs: Tensor, above: Tensor, sums: list[Tensor]) -> list[Tensor]:
    """Of each expert above^T inputs, added to what was there."""
    parts = zip(above.float().split(COUNTS), inputs.float().split(COUNTS), sums, strict=True)
    return [total + back.T @ rows for back, rows, total in parts]


@pytest.mark.parametrize("backwards", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_gradients_are_the_products_of_each_experts_tokens(adds: bool, backwards: bool) -> None:
    inputs, above, found = drawn(backwards=backwards)
    exact = expected(inputs, above, [each.clone() if adds else torch.zeros_like(each) for each in found])
    add(inputs, above, found, adds=adds)
    for mine, right in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-5)


def test_numbers_of_the_next_expert_that_are_not_finite_stay_there() -> None:
    inputs, above, found = drawn()
    # The 40 tokens of the third expert end in the midst of what is read at once, behind which are the fourth's.
    for each in (inputs, above):
        each.split(COUNTS)[3].fill_(torch.inf)
    exact = expected(inputs, above, [each.clone() for each in found])
    add(inputs, above, found)
    assert not found[3].isfinite().any()
    torch.testing.assert_close(found[2], exact[2], atol=1e-4, rtol=1e-5)


def call(inputs: Any, above: Any, sums: Any, **options: Any) -> tuple[Any, list[str]]:
    """What Transformer Engine's function returns as it calls it for weights, and whether its own was called."""
    calls: list[str] = []

    def own(*_: Any, **__: Any) -> str:
        calls.append("own")
        return "own"

    arguments = {"quantization_params": [None], "layout": "NT", "m_splits": COUNTS, "grad": True, "accumulate": True}
    return by_one_kernel(own)(inputs, above, sums, **arguments | {"use_bias": False} | options), calls


def test_transformer_engines_product_of_weights_is_the_kernels() -> None:
    inputs, above, sums = drawn()
    found = copied(sums)
    result, calls = call(inputs.split(COUNTS), above.split(COUNTS), found)
    assert not calls and result == (found, [None] * len(COUNTS), None)
    for mine, right in zip(found, expected(inputs, above, sums), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-5)


def test_other_products_are_left_to_transformer_engine() -> None:
    inputs, above, sums = drawn()
    parts = inputs.split(COUNTS), above.split(COUNTS), sums
    for options in ({"layout": "NN"}, {"use_bias": True}, {"m_splits": torch.tensor(COUNTS)}):
        assert call(*parts, **options) == ("own", ["own"])
    apart = [each.clone() for each in parts[0]]
    assert taken(*parts, COUNTS) and not taken(apart, *parts[1:], COUNTS)
    assert not taken(*parts[:2], [each.half() for each in sums], COUNTS)
    assert not taken(*parts[:2], [sums[1], sums[0], *sums[2:]], COUNTS), "gradients in no order"
    assert not taken(*(each[:0].split([0] * len(COUNTS)) for each in (inputs, above)), sums, [0] * len(COUNTS))
    assert not taken([each.float() for each in parts[0]], *parts[1:], COUNTS)
    # Transformer Engine's quantised parts are no tensors and have no `dtype`.
    assert not taken([object()] * len(COUNTS), *parts[1:], COUNTS)
    assert not taken(inputs[:, :24].split(COUNTS), *parts[1:], COUNTS), "no multiple of a block"
