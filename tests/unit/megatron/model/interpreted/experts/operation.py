"""Products of all experts as one operation, its kernels by Triton's interpreter; run by
tests/multiprocess/test_interpreted.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.model.layers.experts import gradients, products
from rlframe.megatron.model.layers.experts.operation import by_one_operation, held_by, joined
from rlframe.megatron.model.layers.experts.products import multiply, tiles_of
from rlframe.megatron.model.layers.experts.stacked import stacked

COUNTS = [0, 3, 20, 16, 0, 1]
INPUTS, OUTPUTS = 32, 48


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS", "COLUMNS", "TOKENS"):
        monkeypatch.setattr(gradients, name, 16)
    monkeypatch.setattr(gradients, "REDUCES", False)
    for name in ("ROWS", "COLUMNS", "INNER"):
        monkeypatch.setattr(products, name, 16)


def made(**changes: Any) -> tuple[Any, Tensor]:
    """A layer as Megatron's, whose weights have sums of gradients in one buffer, and tokens. Float16, as Triton's
    interpreter multiplies no bfloat16."""
    generator = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(
        use_bias=False, config=SimpleNamespace(fp8=None, rlframe_joins_experts=True), num_gemms=len(COUNTS)
    )
    sums, weights = (torch.randn(len(COUNTS), OUTPUTS, INPUTS, generator=generator) for _ in range(2))
    weights = weights.half()
    for index in range(len(COUNTS)):
        weight: Any = torch.nn.Parameter(weights[-1 - index])
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
    assert joined(layer, tokens, COUNTS)
    with torch.no_grad():
        assert joined(layer, tokens.detach(), COUNTS), "nothing is to be added"
    assert by_one_operation(own)(layer, tokens, torch.tensor(COUNTS)) == "Transformer Engine's"
    assert not joined(layer, tokens.detach(), COUNTS), "autograd would not ask for the weights' gradients"
    assert not joined(layer, tokens.float(), COUNTS)
    quantized = SimpleNamespace(fp8="e4m3", rlframe_joins_experts=True)
    # A policy's configuration may lack what its teacher's has.
    for changes in ({"use_bias": True}, {"config": quantized}, {"config": SimpleNamespace(fp8=None)}):
        assert not joined(made(**changes)[0], tokens, COUNTS)
    for name, other in (("main_grad", layer.weight0.main_grad.half()), ("data", layer.weight0.data.clone())):
        setattr(layer.weight0, name, other)
        assert not joined(layer, tokens, COUNTS), f"memory of {name} is another"
        with torch.no_grad():
            assert not joined(layer, tokens.detach(), COUNTS), "logprobs have the kernels of training"


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_each_experts_tokens_are_multiplied_by_its_weight(
    transposed: bool, backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Programs run in any order: here the last expert's come first.
    monkeypatch.setattr(products, "tiles_of", lambda *given: tiles_of(*given).flip(0).contiguous())
    generator = torch.Generator().manual_seed(2)
    weights = list(torch.randn(len(COUNTS), OUTPUTS, INPUTS, generator=generator).half())[:: -1 if backwards else 1]
    tokens = torch.randn(sum(COUNTS), INPUTS if transposed else OUTPUTS, generator=generator).half()
    # The third expert's last program reads the fourth's tokens too.
    tokens.split(COUNTS)[3].fill_(torch.inf)
    held = stacked(weights)
    assert held and held.step == (-1 if backwards else 1)
    found = multiply(tokens, held, tuple(COUNTS), transposed=transposed)
    parts = zip(tokens.float().split(COUNTS), weights, strict=True)
    exact = torch.cat([part @ (weight.float().T if transposed else weight.float()) for part, weight in parts])
    torch.testing.assert_close(found.float(), exact, atol=0.02, rtol=2**-9, equal_nan=True)


def test_matrices_are_stacked_only_where_they_lie_one_behind_the_other() -> None:
    every = list(torch.zeros(4, OUTPUTS, INPUTS))
    for matrices in (every[:2], every[::-1], every[:1]):
        assert stacked(matrices)
    for matrices in (every[::2], [every[1], every[0], every[2]], [each.T for each in every]):
        assert not stacked(matrices)
    # Neighbours in memory, but of two allocations: no tensor reaches over both.
    memory = bytearray(2 * 4 * OUTPUTS * INPUTS)
    neighbours = [
        torch.frombuffer(memory, dtype=torch.float32, count=OUTPUTS * INPUTS, offset=at).view(OUTPUTS, INPUTS)
        for at in (0, len(memory) // 2)
    ]
    assert neighbours[1].data_ptr() - neighbours[0].data_ptr() == neighbours[0].nbytes and not stacked(neighbours)


def test_memory_that_has_moved_is_looked_at_anew() -> None:
    layer, _ = made()
    held = held_by(layer)
    assert held_by(layer) is held
    moved = torch.zeros(len(COUNTS), OUTPUTS, INPUTS)
    for index in range(len(COUNTS)):
        getattr(layer, f"weight{index}").main_grad = moved[-1 - index]
    assert held_by(layer).gradients.matrix.data_ptr() == moved.data_ptr()


def test_copies_of_weights_for_one_pass_are_not_held() -> None:
    layer, tokens = made()
    own = held_by(layer)
    weights = [getattr(layer, f"weight{index}") for index in range(len(COUNTS))]
    for index, weight in enumerate(weights):
        setattr(layer, f"weight{index}", weight.detach().float())
    assert not joined(layer, tokens.float(), COUNTS)
    for index, weight in enumerate(weights):
        setattr(layer, f"weight{index}", weight)
    assert held_by(layer) is own
