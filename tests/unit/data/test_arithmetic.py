from rlframe.data.arithmetic import Split, records, split_of


def test_the_two_parts_are_disjoint_and_together_every_problem() -> None:
    train = {record.id for record in records(Split.TRAIN)}
    held_out = {record.id for record in records(Split.HELD_OUT)}
    assert not train & held_out
    # 100 * 100 ordered sums, and 100 * 101 / 2 differences with a >= b
    assert len(train) + len(held_out) == 10_000 + 5_050
    assert 0.09 < len(held_out) / 15_050 < 0.11


def test_answers_are_right_and_never_negative() -> None:
    for record in records(Split.TRAIN) + records(Split.HELD_OUT):
        problem, answer = record.fields["prompt"], int(record.fields["answer"])
        left, operator, right = problem[:-1].partition("+" if "+" in problem else "-")
        assert answer == (int(left) + int(right) if operator == "+" else int(left) - int(right)) >= 0


def test_the_split_never_changes() -> None:
    # int(sha256(text)[:16], 16) % 10, worked in a shell
    assert split_of("37+48=") is Split.TRAIN
    assert [record.id for record in records(Split.HELD_OUT)][:4] == ["0+0=", "0+8=", "0+9=", "0+23="]
