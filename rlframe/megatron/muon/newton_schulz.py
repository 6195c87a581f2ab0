"""Orthogonalisation of matrices, and the size of Muon's update. Imports torch alone.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon/), `newtonschulz5`; Liu et al. 2025, "Muon is Scalable for LLM Training"
(Moonlight, arXiv 2502.16982), equation 4.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b and c of Jordan et al.: x -> a x + b x^3 + c x^5 brings singular values in (0, 1] near 1 in five
steps, to between 0.7 and 1.2."""
EPSILON = 1e-7
"""What Jordan et al. add to the norm, so that a matrix of zeros stays one."""


def orthogonalize(matrices: Tensor, *, steps: int) -> Tensor:
    """Returns [N, rows, columns] about U V' for each matrix U S V' of the same shape, in its number format.

    X = G / (|G| + 1e-7); then in each step A = X X' and X = a X + (b A + c A A) X. The shorter axis comes first.
    """
    a, b, c = COEFFICIENTS
    upright = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if upright else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (x / (norm + EPSILON)).to(matrices.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if upright else x


def scale(rows: int, columns: int) -> float:
    """Returns the factor that gives an orthogonal update the root mean square of AdamW's, 0.2, so that both have one
    learning rate and one weight decay: 0.2 sqrt(max(rows, columns)), from Liu et al., equation 4."""
    return 0.2 * max(rows, columns) ** 0.5


def operations(rows: int, columns: int, *, steps: int) -> float:
    """Returns the floating-point operations of `orthogonalize` for one matrix."""
    short, long = sorted((rows, columns))
    return steps * (4.0 * short * short * long + 2.0 * short**3)
