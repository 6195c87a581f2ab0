from rlframe.data.builtin.arithmetic import Split, split_of
from rlframe.data.builtin.questions import records


def test_the_two_parts_are_disjoint_and_together_every_question() -> None:
    train, held_out = ([record.id for record in records(split)] for split in (Split.TRAIN, Split.HELD_OUT))
    assert not set(train) & set(held_out) and len(set(train)) == len(train)
    # 99 * 99 sums, 99 * 100 / 2 differences that are not negative, 99 * 99 - 90 * 90 products with a factor below 10
    assert len(train) + len(held_out) == 9_801 + 4_950 + 1_701
    assert 0.09 < len(held_out) / 16_452 < 0.11


def test_answers_are_right() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    for record in records(Split.HELD_OUT):
        first, operation, second = record.fields["prompt"].removeprefix("What is ").removesuffix("?").split(" ")
        assert int(record.fields["answer"]) == operations[operation](int(first), int(second)) >= 0


def test_the_split_never_changes() -> None:
    assert split_of("What is 92 + 32?") is Split.TRAIN
    assert [record.id for record in records(Split.HELD_OUT)][:2] == ["What is 1 + 2?", "What is 1 + 4?"]
