"""rlframe's kernels for all experts' products and the gradients of their weights (`train.kernels.expert_products`), and
the one CUTLASS kernel for products (`train.kernels.cutlass_experts`), against float64, on one GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.megatron.model.layers.experts.gradients import by_one_kernel
from rlframe.megatron.model.layers.experts.operation import JOINS, by_one_operation

pytestmark = pytest.mark.gpu
TOKENS = [0, 3, 128, 77, 0, 300, 1, 515]
"""Of each expert; some get none."""
ROWS, INNER, COLUMNS = sum(TOKENS), 256, 384
CUTLASS, PRODUCT, OF_WEIGHTS = "GroupProblemShape", "_multiply", "_add"
"""Names of the kernels, the first of which is part of it."""


def inputs() -> tuple[list[Tensor], Tensor, Tensor]:
    """Each expert's weight, the tokens of all, and the gradient of what comes out."""
    generator = torch.Generator("cuda").manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device="cuda", dtype=torch.bfloat16)

    return [matrix(COLUMNS, INNER) for _ in TOKENS], matrix(ROWS, INNER), matrix(ROWS, COLUMNS)


def layers(*, jointly: bool) -> tuple[dict[str, Tensor], tuple[int, int, int]]:
    """Output and gradients of Transformer Engine's layer, and how many kernels of each name there were.

    Args:
        jointly: whether all experts are one operation.
    """
    import transformer_engine.pytorch as te

    weights, tokens, above = inputs()
    layer = te.GroupedLinear(
        len(TOKENS), INNER, COLUMNS, bias=False, params_dtype=torch.bfloat16, device="cuda",
        fuse_wgrad_accumulation=True,
    )  # fmt: skip
    # As in Megatron's gradient buffer, which holds the sum over micro-batches, and begins with the last parameter.
    sums, every = torch.ones(len(TOKENS), COLUMNS, INNER, device="cuda"), torch.stack(weights[::-1])
    for index in range(len(weights)):
        parameter = getattr(layer, f"weight{index}")
        parameter.data, parameter.main_grad = every[-1 - index], sums[-1 - index]
    tokens.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        if jointly:
            # Megatron's layer, which is one of these, has its configuration.
            layer.config = SimpleNamespace(fp8=None, **{JOINS: True})
            joint: Any = by_one_operation(layer.forward)
            output, _ = joint(layer, tokens, TOKENS)
        else:
            output = layer(tokens, TOKENS)
        output.backward(above)
        torch.cuda.synchronize()
    assert tokens.grad is not None
    names = [event.name for event in profiler.events() or ()]
    kernels = sum(CUTLASS in name for name in names), names.count(PRODUCT), names.count(OF_WEIGHTS)
    weight_gradients = {f"weight{index}": getattr(layer, f"weight{index}").main_grad for index in range(len(TOKENS))}
    return {"output": output.detach(), "tokens": tokens.grad} | weight_gradients, kernels


def by_hand() -> dict[str, tuple[Tensor, Tensor]]:
    """The same in float64, each with the product of the factors' absolute values."""
    weights, tokens, above = inputs()
    parts = [(a.double(), b.double()) for a, b in zip(tokens.split(TOKENS), above.split(TOKENS), strict=True)]
    found = {
        "output": [(rows, weight.double().T) for (rows, _), weight in zip(parts, weights, strict=True)],
        "tokens": [(back, weight.double()) for (_, back), weight in zip(parts, weights, strict=True)],
    }
    whole = {
        name: (torch.cat([a @ b for a, b in each]), torch.cat([a.abs() @ b.abs() for a, b in each]))
        for name, each in found.items()
    }
    return whole | {
        f"weight{index}": (back.T @ rows + 1, back.abs().T @ rows.abs() + 1) for index, (rows, back) in enumerate(parts)
    }


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)
@pytest.mark.parametrize("cutlass", [True, False])
@pytest.mark.parametrize("own", ["joint", "gradients", "cublas"])
def test_all_experts_products_are_those_of_float64(cutlass: bool, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_engine.pytorch.module import grouped_linear

    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", str(int(cutlass)))
    if own == "gradients":
        monkeypatch.setattr(grouped_linear, "general_grouped_gemm", by_one_kernel(grouped_linear.general_grouped_gemm))
    found, kernels = layers(jointly=own == "joint")
    # Products are forward and for the tokens' gradient. The weights' gradients have inner sizes of their own.
    expected = (0, 2, 1) if own == "joint" else (2 if cutlass else 0, 0, int(own != "cublas"))
    assert kernels == expected
    for name, (exact, scale) in by_hand().items():
        value = found[name].double()
        # Sums in float32, in whatever order: each of at most 515 additions rounds, or cuts off, by 2^-22 of the sum of
        # the absolute values. What is bfloat16 is then rounded once to 8 bits, by half a unit of the last.
        limit = 515 * 2**-22 * scale + (0 if name.startswith("weight") else 2**-8 * exact.abs())
        assert bool(((value - exact).abs() <= limit).all()), f"{name}: off by {float((value - exact).abs().max()):.3g}"
