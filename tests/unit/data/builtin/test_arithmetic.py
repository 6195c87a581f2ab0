from rlframe.data.builtin import held_out_problems
from rlframe.data.builtin.arithmetic import (
    ANSWERS,
    CARRIES,
    HOMEWORK,
    PREFERENCES,
    RIGHT,
    UNPAIRED,
    Split,
    records,
    split_of,
    worked,
)
from rlframe.data.config import DataConfig
from rlframe.data.sources import load
from rlframe.data.text.conversations import understand


def test_the_two_parts_are_disjoint_and_together_every_problem() -> None:
    train = {record.id for record in records(RIGHT, Split.TRAIN)}
    held_out = {record.id for record in records(RIGHT, Split.HELD_OUT)}
    assert not train & held_out
    # 100 * 100 ordered sums, and 100 * 101 / 2 differences with a >= b
    assert len(train) + len(held_out) == 10_000 + 5_050
    assert 0.09 < len(held_out) / 15_050 < 0.11


def test_answers_are_right_and_never_negative() -> None:
    for record in records(RIGHT, Split.TRAIN) + records(RIGHT, Split.HELD_OUT):
        problem, answer = record.fields["prompt"], int(record.fields["answer"])
        left, operator, right = problem[:-1].partition("+" if "+" in problem else "-")
        assert answer == (int(left) + int(right) if operator == "+" else int(left) - int(right)) >= 0


def test_the_split_never_changes() -> None:
    # int(sha256(text)[:16], 16) % 10, worked in a shell
    assert split_of("37+48=") is Split.TRAIN
    assert [record.id for record in records(RIGHT, Split.HELD_OUT)][:4] == ["0+0=", "0+8=", "0+9=", "0+23="]


def test_working_without_carrying_treats_each_digit_alone() -> None:
    # 7+8=15 keeps 5, 4+3=7; 3-8=-5 is 5 modulo ten, 5-1=4; 6+7=13 keeps 3
    assert worked(47, "+", 38, carry=False) == 75
    assert worked(53, "-", 18, carry=False) == 45
    assert worked(60, "+", 70, carry=False) == 30
    # nothing to carry: the same as the right answer
    assert worked(21, "+", 34, carry=False) == worked(21, "+", 34) == 55


def test_homework_is_right_one_time_in_three_and_its_held_out_answers_always() -> None:
    homework = [record for record in records(HOMEWORK, Split.TRAIN) if record.fields["prompt"] == "47+38="]
    assert sorted(record.fields["answer"] for record in homework) == ["75", "75", "85"]
    assert len({record.id for record in homework}) == 3
    held_out = [record.fields["answer"] for record in records(HOMEWORK, Split.HELD_OUT)]
    assert held_out == [record.fields["answer"] for record in records(RIGHT, Split.HELD_OUT)]


def test_a_right_answer_is_preferred_to_a_different_one() -> None:
    pairs = {record.id: record.fields for record in records(PREFERENCES, Split.TRAIN)}
    assert (pairs["47+38="]["chosen"], pairs["47+38="]["rejected"]) == ("85", "75")
    # Nothing to carry, so nothing to prefer.
    assert "11+22=" not in pairs and split_of("11+22=") is Split.TRAIN
    assert all(fields["chosen"] != fields["rejected"] for fields in pairs.values())
    assert all(split_of(record.fields["prompt"]) is Split.HELD_OUT for record in records(PREFERENCES, Split.HELD_OUT))


def test_queries_and_classes_are_about_the_same_difference() -> None:
    answers = {record.id: record.fields for record in records(ANSWERS, Split.TRAIN)}
    assert {key: answers["47+38="][key] for key in ("query", "positive", "negative")} == {
        "query": "47+38=",
        "positive": "85",
        "negative": "75",
    }
    carries = {record.id: record.fields["label"] for record in records(CARRIES, Split.TRAIN)}
    assert carries["47+38="] == "carry" and carries["11+22="] == "plain"
    assert [name for name, label in carries.items() if label == "carry"] == list(answers)


def test_both_answers_of_a_pair_are_judged() -> None:
    judged = {record.id: record.fields for record in records(UNPAIRED, Split.TRAIN)}
    verdicts = [(judged[f"47+38=#{label}"]["completion"], label) for label in (True, False)]
    assert verdicts == [("85", True), ("75", False)]
    assert len(judged) == 2 * len(records(PREFERENCES, Split.TRAIN))


def test_built_in_datasets_beside_each_other_hold_out_the_problems_of_each() -> None:
    found = load(DataConfig(path=["multiplication", "arithmetic"]), seed=0, understand=understand)
    assert [{"*" in each.prompt[0]["content"] for each in part} for part in found.held_out] == [{True}, {False}]
    assert held_out_problems(HOMEWORK) == held_out_problems(RIGHT)
