"""Majority votes, worked by hand."""

from rlframe.ops.statistics.majority import elected


def test_the_most_frequent_answer_is_elected_by_the_first_who_gave_it() -> None:
    assert elected(["7", "8", "8"]) == 1
    assert elected(["8", "7", "8", "7", "7"]) == 1


def test_of_equally_frequent_answers_it_is_the_one_given_first() -> None:
    assert elected(["7", "8", "8", "7"]) == 0
    assert elected([None, "9", "8"]) == 1


def test_no_answer_is_no_vote() -> None:
    assert elected([None, None, "8"]) == 2
    assert elected([None]) is None and elected([]) is None
