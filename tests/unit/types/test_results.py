"""Metrics add up over any split."""

import math

from rlframe.types.results import EffectiveSize, Mean, MeanIfAny, Peak, Sum, merge


def test_metrics_combine_by_kind() -> None:
    # Means pool their counts: (3 + 1) / (2 + 8), not the mean of 1.5 and 0.125.
    assert (Mean(3.0, 2.0) + Mean(1.0, 8.0)).value == 0.4
    assert Peak(2.0) + Peak(-5.0) == Peak(-5.0) + Peak(2.0) == Peak(2.0)
    assert math.isnan((Peak(2.0) + Peak(math.nan)).value) and math.isnan((Peak(math.nan) + Peak(2.0)).value)
    assert Sum(2.0) + Sum(-5.0) == Sum(-3.0)


def test_a_mean_of_nothing_is_zero_and_adds_nothing() -> None:
    assert Mean(0.0, 0.0).value == 0.0
    assert Mean(0.0, 0.0) + Mean(3.0, 2.0) == Mean(3.0, 2.0)


def test_merge_keeps_what_only_one_share_has() -> None:
    shares = [{"a": Sum(1.0), "b": Peak(3.0)}, {"a": Sum(2.0)}, {"c": Mean(1.0, 1.0)}]
    assert merge(shares) == {"a": Sum(3.0), "b": Peak(3.0), "c": Mean(1.0, 1.0)}
    assert merge([]) == {}


def test_merge_leaves_out_means_and_peaks_of_nothing() -> None:
    nothing = {"a": MeanIfAny(0.0, 0.0), "b": Peak(-math.inf), "c": Mean(0.0, 0.0)}
    assert merge([nothing, nothing]) == {"c": Mean(0.0, 0.0)}
    assert merge([nothing, {"a": MeanIfAny(3.0, 2.0), "b": Peak(0.0)}]) == {
        "a": MeanIfAny(3.0, 2.0), "b": Peak(0.0), "c": Mean(0.0, 0.0),
    }  # fmt: skip


def test_the_effective_size_of_a_whole_is_not_the_mean_of_its_parts() -> None:
    # Weights 1, 1 and 4: (1 + 1 + 4)^2 / (1 + 1 + 16) = 2 of 3. Each part by itself is wholly effective.
    parts = EffectiveSize(2.0, 2.0, 2.0), EffectiveSize(4.0, 16.0, 1.0)
    assert [part.value for part in parts] == [1.0, 1.0]
    assert (parts[0] + parts[1]).value == 2 / 3
    assert EffectiveSize(0.0, 0.0, 0.0).value == EffectiveSize(0.0, 0.0, 5.0).value == 0.0
