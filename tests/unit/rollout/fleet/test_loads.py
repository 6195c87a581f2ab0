"""Which engine gets what."""

from rlframe.rollout.fleet.loads import Loads


def test_the_largest_is_dealt_first_and_engines_get_like_loads():
    # Largest first: 120 to engine 0, 80 to 1, 70 to 1 (80 < 120), 30 to 0 (120 < 150): 150 each.
    assert Loads(2).deal([120, 30, 70, 80]) == [0, 0, 1, 1]


def test_more_engines_than_work_leave_some_idle():
    assert Loads(3).deal([15]) == [0]


def test_unfinished_work_counts_until_it_is_finished():
    loads = Loads(2)
    assert loads.deal([100]) == [0]
    assert loads.deal([10, 20]) == [1, 1], "100 wait at engine 0"
    loads.finish(0, 100)
    assert loads.deal([5]) == [0]
