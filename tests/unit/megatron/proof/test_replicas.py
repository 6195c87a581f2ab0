"""How the shares of ranks become the word on which copies of the training state differ."""

from rlframe.megatron.proof.replicas import first_difference, place

WHOLE, HALVES = (0, 0, 0), (0, 1, 0)


def test_copies_add_up_over_the_ranks_that_hold_their_pieces() -> None:
    # One copy whole on rank 0, another in two pieces on ranks 1 and 2, whose digests wrap.
    ranks = [{("norm", WHOLE): (5, 8)}, {("norm", HALVES): (2**64 - 1, 3)}, {("norm", HALVES): (6, 5)}]
    assert first_difference(ranks) is None


def test_copies_that_differ_are_named_with_their_ranks() -> None:
    ranks = [{("norm", WHOLE): (5, 8), ("head", WHOLE): (1, 1)}, {("norm", HALVES): (4, 8)}]
    said = first_difference(ranks)
    assert said is not None and "norm is held by ranks 0 and by ranks 1 with different contents" in said
    # Equal digests of other parts are no copies either.
    assert first_difference([{("norm", WHOLE): (5, 8)}, {("norm", HALVES): (5, 7)}]) is not None


def test_a_place_counts_rows_over_all_leading_axes() -> None:
    # Expert 2 of 4, row 3 of 5, column 6 of 7: row 2 * 5 + 3.
    assert place((4, 5, 7), (2, 3, 6)) == (13, 6)
    assert place((7,), (6,)) == (0, 6)
