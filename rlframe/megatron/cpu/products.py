"""Matrix products in float32 on processors with AVX-512, by oneDNN in place of MKL.

torch gives float32 products to MKL, which computes with 256 bits on AMD's processors. oneDNN, which is in torch too,
takes 512: on a core of an EPYC of 2025 230 to 250 GFLOP/s where MKL reaches 110, and a training step of the main job
spends a third of its time in products. An EPYC of family 25, with AVX-512 on units of 256 bits, does 83 to 101 GFLOP/s
with either. oneDNN compiles a kernel for each shape, in half a millisecond, and the number of tokens is another one in
each product. So it gets blocks of tokens, and MKL the rest.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
"""The number of tokens that oneDNN gets is a multiple of it, so that few shapes occur."""
LEAST = 1 << 20
"""Smallest product of the three dimensions for which oneDNN's call does not cost more than it saves."""


def is_faster() -> bool:
    """Returns whether oneDNN computes products in float32 with AVX-512 here, at least about as fast as MKL."""
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.mkldnn.is_available() and "AVX512" in torch.backends.cpu.get_cpu_capability()


def by_blocks(matmul: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a function that computes what `matmul` does, and calls it for whatever is not two large matrices in
    float32, or has to be differentiated."""

    def product(first: Tensor, second: Tensor) -> Tensor:
        if torch.is_grad_enabled() or not suits(first, second):
            return matmul(first, second)
        rows = first.flatten(0, -2)
        by_token = rows.is_contiguous()
        size = rows.shape[0 if by_token else 1]
        whole = size - size % BLOCK
        if not whole or not (by_token or rows.t().is_contiguous()):
            return matmul(first, second)
        # Blocks are cut where memory is, so that they are contiguous. Of others oneDNN computes one number at a time:
        # 8 s in place of 9 ms for 256 tokens of a hidden size of 576.
        if by_token:
            found = onednn(rows[:whole], second)
            if whole < size:
                found = torch.cat([found, torch.mm(rows[whole:], second)])
        else:
            # The gradient of a weight: a sum over tokens.
            found = onednn(rows[:, :whole], second[:whole])
            if whole < size:
                found.addmm_(rows[:, whole:], second[whole:])
        return found.view(*first.shape[:-1], second.shape[1])

    return product


def suits(first: Tensor, second: Tensor) -> bool:
    """Returns whether a product is one for `onednn`."""
    return (
        second.dim() == 2
        and first.dim() in (2, 3)
        and first.dtype == second.dtype == torch.float32
        and first.numel() * second.shape[1] >= LEAST
    )


def onednn(first: Tensor, second: Tensor) -> Tensor:
    """Returns [M, N], the product of [M, K] and [K, N]."""
    return torch.ops.mkldnn._linear_pointwise(first, second.t(), None, "none", [], "")
