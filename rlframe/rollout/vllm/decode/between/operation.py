"""The operation `rlframe::between`, for graphs of torch.compile: one kernel for few rows, several for more."""

from typing import Any

import torch
from torch import Tensor

from rlframe.rollout.vllm.decode.between.launch import ROWS, Layer, between
from rlframe.rollout.vllm.decode.between.rows import add_norm, gated
from rlframe.rollout.vllm.decode.few_rows import product

LIBRARY = torch.library.Library("rlframe", "FRAGMENT")
LIBRARY.define(
    "between(Tensor attended, Tensor residual, Tensor output, Tensor norm, Tensor gate_up, Tensor down, "
    "Tensor? next_norm, Tensor? next, Tensor? bias, float epsilon) -> (Tensor, Tensor)"
)


def _between(
    attended: Tensor,
    residual: Tensor,
    output: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    next_norm: Tensor | None,
    next: Tensor | None,  # noqa: A002 - named as in the operation
    bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Returns what `launch.between` returns, for any number of rows."""
    if len(residual) <= ROWS:
        layer = Layer(output, norm, gate_up, down, next_norm, next, bias)
        return between(attended, residual, layer, epsilon)
    normed, middle = add_norm(product(attended, output, None), residual, norm, epsilon)
    result = product(gated(product(normed, gate_up, None)), down, None)
    if next is None or next_norm is None:
        return result, middle
    normed, total = add_norm(result, middle, next_norm, epsilon)
    return product(normed, next, bias), total


def _shaped(attended: Tensor, residual: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns tensors of the shapes that `_between` returns, for the same arguments."""
    *_, following, _, _ = others
    columns = residual.shape[1] if following is None else following.shape[0]
    return residual.new_empty(residual.shape[0], columns), torch.empty_like(residual)


LIBRARY.impl("between", _between, "CUDA")
torch.library.register_fake("rlframe::between", _shaped, lib=LIBRARY)
