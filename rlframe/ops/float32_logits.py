"""The output layer's product, kept in float32.

A product of two numbers in bfloat16 is exact in float32, where sums are made anyway. What is lost is lost when the
logits are rounded to bfloat16: up to 0.06 for a logit of 16. Trainer and engine round states that differ a little, so
that their logits differ by whole steps of bfloat16 (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv 2510.13786).
"""

import torch
from jaxtyping import Float
from torch import Tensor


def float32_logits(states: Float[Tensor, "T H"], weight: Float[Tensor, "V H"]) -> Float[Tensor, "T V"]:
    """Returns states @ weight.T in float32, from operands in their own number format. It has no gradient on CUDA.

    There it is one product in the operands' format. Elsewhere both are copied to float32, which gives the same numbers
    but for the order of sums.
    """
    if weight.is_cuda and weight.dtype is not torch.float32:
        return torch.mm(states, weight.t(), out_dtype=torch.float32)
    return states.float() @ weight.float().t()
