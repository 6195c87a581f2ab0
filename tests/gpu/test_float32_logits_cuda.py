"""The product whose logits stay in float32, on one GPU."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_logits_are_exact_and_gradients_are_those_of_rounded_slopes() -> None:
    from rlframe.megatron.vocab.float32_head import Float32Product

    generator = torch.Generator("cuda").manual_seed(0)
    made = {"generator": generator, "device": "cuda"}
    states = torch.randn(300, 256, **made).bfloat16().requires_grad_()
    weight = torch.randn(1000, 256, **made).bfloat16().requires_grad_()
    slopes = torch.randn(300, 1000, **made)
    logits = Float32Product.apply(states, weight)
    logits.backward(slopes)
    assert logits.dtype is torch.float32
    # Of about 16, in which bfloat16 has steps of 0.06.
    torch.testing.assert_close(logits.double(), states.double() @ weight.double().t(), atol=1e-4, rtol=0)
    rounded = slopes.bfloat16().double()
    for found, expected in ((states, rounded @ weight.double()), (weight, rounded.t() @ states.double())):
        assert found.grad is not None and found.grad.dtype is torch.bfloat16
        torch.testing.assert_close(found.grad.double(), expected, atol=0.01 * float(expected.abs().max()), rtol=0)
