"""The output layer with a weight that is not trained."""

from torch import Tensor


def multiplied_once(logits: Tensor) -> Tensor:
    """Returns the logits, [T, 1, V_local], such that the backward pass of a frozen output layer is one product of
    [T, V_local] and [V_local, H].

    The gradient of logits [T, 1, V_local] comes with the strides of a transposed [1, T, V_local]. By these
    `torch.matmul` of Megatron's `LinearWithFrozenWeight` does not see that it is a matrix, and reads the whole weight
    for each token: 4.5 s for 16,384 tokens of Qwen3-8B on an H200. A weight that is trained does not meet this:
    `should_fold` of aten/src/ATen/native/LinearAlgebra.cpp. Megatron-Core 0.19 makes the matrix itself: can go with
    0.16.
    """
    if logits.requires_grad:
        logits = logits.view_as(logits)
        logits.register_hook(lambda gradient: gradient.squeeze(1).unsqueeze(1))
    return logits
