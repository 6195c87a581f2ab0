"""The GPU's SwiGLU by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.megatron.model.layers import swiglu_kernels

ROWS, WIDTH = 5, 37


def reference(inputs: Tensor, weights: Tensor | None) -> Tensor:
    """By torch, in float32."""
    gate, up = inputs.float().chunk(2, -1)
    return F.silu(gate) * up * (1.0 if weights is None else weights)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs in rows further apart than they are wide, weights, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    wide = (3 * torch.randn(ROWS, 2 * WIDTH + 3, generator=generator)).to(dtype)
    weights = torch.rand(ROWS, 1, generator=generator)
    return wide[:, : 2 * WIDTH], weights, torch.randn(WIDTH, ROWS, generator=generator).to(dtype).T


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, block: int, dtype: torch.dtype, weighted: bool
) -> None:
    monkeypatch.setattr(swiglu_kernels, "BLOCK", block)
    inputs, weights, grad = drawn(dtype)
    leaves = [inputs.float().requires_grad_(), weights.clone().requires_grad_()]
    expected = reference(leaves[0], leaves[1] if weighted else None)
    expected.backward(grad.float())
    relative = 1e-5 if dtype == torch.float32 else 2**-7  # Triton's interpreter cuts bfloat16 off, a GPU rounds
    if weighted:
        values = swiglu_kernels.weighted_swiglu(inputs, weights)
        of_inputs, of_weights = swiglu_kernels.weighted_swiglu_back(grad, inputs, weights)
        assert of_weights.shape == weights.shape
        torch.testing.assert_close(of_weights, leaves[1].grad, atol=1e-5, rtol=1e-5)
    else:
        values, of_inputs = swiglu_kernels.swiglu(inputs), swiglu_kernels.swiglu_back(grad, inputs)
    assert values.dtype == of_inputs.dtype == dtype and of_inputs.shape == inputs.shape
    torch.testing.assert_close(values.float(), expected.detach(), atol=1e-6, rtol=relative)
    torch.testing.assert_close(of_inputs.float(), leaves[0].grad, atol=1e-6, rtol=relative)


def test_no_rows_make_no_rows() -> None:
    inputs, weights = torch.empty(0, 2 * WIDTH), torch.empty(0, 1)
    assert swiglu_kernels.weighted_swiglu(inputs, weights).shape == (0, WIDTH)
    of_inputs, of_weights = swiglu_kernels.weighted_swiglu_back(torch.empty(0, WIDTH), inputs, weights)
    assert of_inputs.shape == (0, 2 * WIDTH) and of_weights.shape == (0, 1)
