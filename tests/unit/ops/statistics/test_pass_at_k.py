"""pass@k and standard errors, against definitions that are counted out."""

import itertools
import math
import statistics

import pytest

from rlframe.ops.statistics.pass_at_k import pass_at_k, sizes_up_to, standard_error


@pytest.mark.parametrize("num_attempts", range(1, 7))
def test_it_is_the_fraction_of_choices_of_k_attempts_with_a_solved_one(num_attempts: int) -> None:
    for num_solved in range(num_attempts + 1):
        attempts = [index < num_solved for index in range(num_attempts)]
        for k in range(1, num_attempts + 1):
            choices = list(itertools.combinations(attempts, k))
            expected = sum(map(any, choices)) / len(choices)
            assert pass_at_k(num_attempts, num_solved, k) == pytest.approx(expected, abs=1e-12)


def test_numbers_worked_by_hand() -> None:
    # 1 - C(8, 3) / C(10, 3) = 1 - 56 / 120.
    assert pass_at_k(10, 2, 3) == pytest.approx(64 / 120)
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 1, 4) == 1.0
    # 1 - (1 - 0.5) ** 2 = 0.75 would be the biased estimate.
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)


def test_k_of_many_attempts_is_exact() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)


def test_k_is_each_power_of_two_and_the_number_of_attempts() -> None:
    assert [sizes_up_to(count) for count in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_standard_error_is_that_of_the_mean_of_the_prompts() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 0.5]
    assert standard_error(values) == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert math.isnan(standard_error([1.0]))
