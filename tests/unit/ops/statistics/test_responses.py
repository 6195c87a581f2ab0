"""Quantiles and repetition, worked by hand."""

import numpy as np
import pytest

from rlframe.ops.statistics.responses import quantiles, repeated_fraction


def test_quantiles_are_values_by_nearest_rank() -> None:
    # Sorted 1 2 3 4 10 20 30 40 50 60; ranks 5, 9 and 10 of ten.
    values = np.array([60, 1, 50, 2, 40, 3, 30, 4, 20, 10])
    assert quantiles(values, (0.5, 0.9, 0.99)) == [10.0, 50.0, 60.0]
    assert quantiles(np.array([7]), (0.0, 0.5, 1.0)) == [7.0, 7.0, 7.0]


def fraction(*sequences: list[int]) -> float | None:
    return repeated_fraction(np.concatenate(sequences), np.array([len(each) for each in sequences]))


def test_a_4_gram_counts_when_it_comes_again_in_its_own_sequence() -> None:
    # abcdabcd: abcd bcda cdab dabc abcd, four of five are different.
    assert fraction([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert fraction([7, 7, 7, 7, 7]) == pytest.approx(1 / 2)
    assert fraction([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0, "in another sequence it is no repetition"
    # The mean over the two sequences that have a 4-gram.
    assert fraction([1, 2, 3, 4, 1, 2, 3, 4], [9, 9, 9], [7, 7, 7, 7, 7]) == pytest.approx((1 / 5 + 1 / 2) / 2)
    assert fraction([1, 2, 3], [4, 5]) is None
    assert fraction([3, 1, 2, 4, 1, 3, 2, 4]) == 0.0, "the order counts"


def test_many_tokens_agree_with_counting_them() -> None:
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 4, length).tolist() for length in random.integers(1, 60, 200)]
    expected = []
    for each in sequences:
        grams = [tuple(each[place : place + 4]) for place in range(len(each) - 3)]
        expected += [1 - len(set(grams)) / len(grams)] if grams else []
    assert fraction(*sequences) == pytest.approx(float(np.mean(expected)))
