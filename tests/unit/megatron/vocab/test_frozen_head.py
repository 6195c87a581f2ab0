"""The backward pass of a frozen output layer is one product."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import linear_with_frozen_weight
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlframe.megatron.compat import IS_0_16
from rlframe.megatron.vocab.frozen_head import multiplied_once

TOKENS, VOCAB_SIZE, WIDTH = 5, 11, 3


class Operations(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


def backward(weight: Tensor, states: Tensor, *, once: bool) -> tuple[Tensor, set[str]]:
    """The gradient of states behind Megatron's frozen layer, and the operations that found it."""
    states = states.clone().requires_grad_()
    logits = linear_with_frozen_weight(
        states, weight, None, gradient_accumulation_fusion=False, allreduce_dgrad=False, sequence_parallel=False,
        tp_group=None, grad_output_buffer=None, wgrad_deferral_limit=None,
    )  # fmt: skip
    output = (multiplied_once(logits) if once else logits).transpose(0, 1).contiguous()
    with Operations() as operations:
        output.square().sum().backward()
    assert states.grad is not None
    return states.grad, operations.names


def test_the_weight_is_read_once_and_the_gradient_is_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    states = torch.randn(TOKENS, 1, WIDTH, generator=generator)
    plain, before = backward(weight, states, once=False)
    found, after = backward(weight, states, once=True)
    # Megatron-Core 0.19 makes a matrix of the gradient itself.
    assert ("aten::bmm" in before) == IS_0_16, "where torch finds the matrix itself, multiplied_once can go"
    assert "aten::bmm" not in after and "aten::mm" in after
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("trained", [False, True])
def test_logits_are_the_same(trained: bool) -> None:
    logits = torch.arange(6.0).view(3, 1, 2).requires_grad_(trained)
    assert torch.equal(multiplied_once(logits), logits)
