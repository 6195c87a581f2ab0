"""Products of all experts as one operation, with torch's products in the place of Transformer Engine's and the kernel
of gradients by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.model.layers import expert_gradients, joint_experts
from rlframe.megatron.model.layers.joint_experts import by_one_operation, joins

COUNTS = [0, 3, 20, 16, 0, 1]
INPUTS, OUTPUTS = 32, 48


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS", "TOKENS"):
        monkeypatch.setattr(expert_gradients, name, 16)
    monkeypatch.setattr(expert_gradients, "REDUCES", False)

    def multiplied(weights: Sequence[Tensor], rows: Tensor, counts: list[int], *, layout: str) -> Tensor:
        parts = zip(rows.split(counts), weights, strict=True)
        return torch.cat([part @ (weight.T if layout == "TN" else weight) for part, weight in parts])

    monkeypatch.setattr(joint_experts, "multiplied", multiplied)


def made(**changes: Any) -> tuple[Any, Tensor]:
    """A layer as Megatron's, whose weights have sums of gradients in one buffer, and tokens. Float16, as Triton's
    interpreter multiplies no bfloat16."""
    generator = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(use_bias=False, config=SimpleNamespace(fp8=None), num_gemms=len(COUNTS))
    sums = torch.randn(len(COUNTS), OUTPUTS, INPUTS, generator=generator)
    for index in range(len(COUNTS)):
        weight: Any = torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, generator=generator).half())
        weight.main_grad = sums[-1 - index]
        setattr(layer, f"weight{index}", weight)
    vars(layer).update(changes)
    return layer, torch.randn(sum(COUNTS), INPUTS, generator=generator).half().requires_grad_()


def own(*_: Any) -> str:
    return "Transformer Engine's"


@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_are_those_of_each_experts_product(frozen: bool) -> None:
    layer, tokens = made()
    weights = [getattr(layer, f"weight{index}") for index in range(len(COUNTS))]
    before = [each.main_grad.clone() for each in weights]
    for each in weights:
        each.requires_grad_(not frozen)
    result, bias = by_one_operation(own)(layer, tokens, COUNTS)
    above = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).half()
    result.backward(above)
    leaves = [each.detach().float().requires_grad_() for each in weights]
    inputs = tokens.detach().float().requires_grad_()
    expected = torch.cat([part @ weight.T for part, weight in zip(inputs.split(COUNTS), leaves, strict=True)])
    expected.backward(above.float())
    assert bias is None and all(each.grad is None for each in weights)
    torch.testing.assert_close(result.float(), expected, atol=0.05, rtol=2**-9)
    torch.testing.assert_close(tokens.grad.float(), inputs.grad, atol=0.05, rtol=2**-9)
    for weight, start, leaf in zip(weights, before, leaves, strict=True):
        sums = start if frozen else start + leaf.grad
        torch.testing.assert_close(weight.main_grad, sums, atol=1e-4, rtol=1e-5)


def test_no_tokens_leave_sums_as_they_are() -> None:
    layer, tokens = made()
    none, before = tokens.detach()[:0].requires_grad_(), layer.weight0.main_grad.clone()
    result, _ = by_one_operation(own)(layer, none, [0] * len(COUNTS))
    result.sum().backward()
    assert none.grad.shape == (0, INPUTS) and torch.equal(layer.weight0.main_grad, before)


def test_other_layers_are_left_to_transformer_engine() -> None:
    layer, tokens = made()
    assert joins(layer, tokens, COUNTS)
    with torch.no_grad():
        assert joins(layer, tokens.detach(), COUNTS), "nothing is to be added"
    assert by_one_operation(own)(layer, tokens, torch.tensor(COUNTS)) == "Transformer Engine's"
    assert not joins(layer, tokens.detach(), COUNTS), "autograd would not ask for the weights' gradients"
    assert not joins(layer, tokens.float(), COUNTS)
    for changes in ({"use_bias": True}, {"config": SimpleNamespace(fp8="e4m3")}):
        assert not joins(made(**changes)[0], tokens, COUNTS)
    layer.weight3.main_grad = layer.weight3.main_grad.half()
    assert not joins(layer, tokens, COUNTS)
