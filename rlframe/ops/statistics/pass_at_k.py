"""pass@k: the probability that at least one of k attempts at a task solves it. Pure."""

import math
from collections.abc import Sequence


def pass_at_k(num_attempts: int, num_solved: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from `num_attempts` attempts at one task: 1 - C(n - c, k) / C(n, k), the
    fraction of all choices of k attempts that hold a solved one.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374), equation 1.

    Args:
        num_attempts: n, at least k.
        num_solved: c, the number of them that solved the task.
    """
    assert 0 < k <= num_attempts and 0 <= num_solved <= num_attempts
    return 1.0 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def sizes_up_to(num_attempts: int) -> list[int]:
    """Returns the k for which pass@k is reported: the powers of two below `num_attempts`, and itself.

    Example:
        >>> sizes_up_to(6)
        [1, 2, 4, 6]
    """
    powers = [1 << exponent for exponent in range(num_attempts.bit_length()) if 1 << exponent < num_attempts]
    return [*powers, num_attempts]


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of independent values, one of each task: their standard deviation (over
    n - 1) divided by the root of n. NaN of fewer than two.

    Attempts at one task are not independent of each other. The mean of each task is, which makes this the clustered
    standard error of Miller, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2, for tasks with equally many
    attempts.
    """
    count = len(values)
    if count < 2:
        return math.nan
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
