"""Limits follow what the last ones took, between a floor and a ceiling."""

import math

from rlframe.cluster.watch.limits import NUM_REMEMBERED, Limits


def test_the_first_of_its_kind_has_the_ceiling() -> None:
    assert Limits(ceiling_s=1800, factor=10, floor_s=300).of("train") == 1800


def test_later_ones_have_so_many_times_the_slowest() -> None:
    limits = Limits(ceiling_s=1800, factor=10, floor_s=300)
    for seconds in (40.0, 60.0, 50.0):
        limits.note("train", seconds)
    # 10 * 60.
    assert limits.of("train") == 600 and limits.of("rollout") == 1800


def test_quick_ones_have_the_floor_and_slow_ones_the_ceiling() -> None:
    limits = Limits(ceiling_s=1800, factor=10, floor_s=300)
    limits.note("reward", 0.1)
    limits.note("train", 1000.0)
    assert (limits.of("reward"), limits.of("train")) == (300, 1800)
    assert limits.of("reward", ceiling_s=30) == 30, "a ceiling of the caller's goes before the floor"


def test_what_was_slow_long_ago_is_forgotten() -> None:
    limits = Limits(ceiling_s=1800, factor=10, floor_s=1)
    limits.note("train", 100.0)
    for _ in range(NUM_REMEMBERED):
        limits.note("train", 2.0)
    assert limits.of("train") == 20


def test_without_a_floor_nothing_is_learnt() -> None:
    limits = Limits()
    limits.note("train", 0.0)
    assert limits.of("train", ceiling_s=30) == 30 and limits.of("train") == math.inf
