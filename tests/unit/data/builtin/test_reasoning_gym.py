"""Tasks of reasoning-gym as data, and its verifiers as rewards."""

import pytest

from rlframe.data.builtin.arithmetic import Split
from rlframe.data.builtin.reasoning_gym import parsed, records
from rlframe.data.config import DataConfig
from rlframe.data.sources import load
from rlframe.data.text.conversations import understand
from rlframe.rewards.base import Attempt, build_reward
from rlframe.rewards.config import RewardTerm
from rlframe.types.rollout import FinishReason
from rlframe.utils.errors import DataError, RewardError

SUMS = "reasoning_gym:chain_sum?size=50&min_terms=2&max_terms=2&max_digits=2"


def attempt(response: str, fields: dict) -> Attempt:
    return Attempt(
        prompt_text="", response_text=response, answer="", num_response_tokens=1, finish_reason=FinishReason.STOP,
        fields=fields,
    )  # fmt: skip


def test_settings_are_part_of_the_name() -> None:
    assert parsed(SUMS) == ("chain_sum", {"size": 50, "min_terms": 2, "max_terms": 2, "max_digits": 2})
    assert parsed("reasoning_gym:leg_counting?seed=3&x=word") == ("leg_counting", {"seed": 3, "x": "word"})


def test_tasks_repeat_and_the_parts_differ() -> None:
    train, held_out = records(SUMS, Split.TRAIN), records(SUMS, Split.HELD_OUT)
    assert len(train) == 50 and len(held_out) == 5
    assert [each.fields for each in records(SUMS, Split.TRAIN)] == [each.fields for each in train]
    assert not {each.fields["id"] for each in train} & {each.fields["id"] for each in held_out}


def test_several_data_sets_mix_and_each_holds_out_its_own() -> None:
    found = load(
        DataConfig(path=[SUMS, "reasoning_gym:leg_counting?size=30", "arithmetic#20"], evaluation_count=10**6),
        seed=0,
        understand=understand,
    )
    sizes = [len(part) for part in found.train]
    assert sizes[1:] == [30, 20] and 40 <= sizes[0] <= 50, "a sum that is held out is not trained on"
    assert [len(part) > 0 for part in found.held_out] == [True, True, True]


def test_a_response_gets_the_score_of_the_verifier() -> None:
    reward = build_reward(RewardTerm(name="reasoning_gym"), key="reward.parts.r")
    tagged = build_reward(RewardTerm(name="reasoning_gym", options={"tag": "answer"}), key="reward.parts.r")
    for record in records(SUMS, Split.TRAIN)[:5]:
        right = record.fields["answer"]
        assert reward.score(attempt(f" {right}\n", record.fields)) == 1.0
        assert reward.score(attempt(f"{int(right) + 1}", record.fields)) < 1.0  # type: ignore[operator]
        assert tagged.score(attempt(f"hm<answer>1x</answer> or <answer>{right}</answer>", record.fields)) == 1.0
        assert tagged.score(attempt(right, record.fields)) == 0.0
    with pytest.raises(RewardError, match="no task of reasoning-gym"):
        reward.score(attempt("1", {}))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("reasoning_gym:nobody", "has no data set 'nobody'; it has ab, acre"),
        ("reasoning_gym:chain_sum?size=0", "size must be a whole number of at least 1, got 0"),
        ("reasoning_gym:chain_sum?size=many", "size must be a whole number of at least 1, got 'many'"),
        ("reasoning_gym:chain_sum?size=1.5", "size must be a whole number of at least 1, got 1.5"),
        ("reasoning_gym:chain_sum?seed=x", "seed must be a whole number, got 'x'"),
        ("reasoning_gym:chain_sum?seed=null", "seed must be a whole number, got None"),
        ("reasoning_gym:chain_sum?nobody=1", "refuses the settings of chain_sum"),
    ],
)
@pytest.mark.parametrize("split", Split)
def test_what_cannot_be_made_is_a_sentence(path: str, said: str, split: Split) -> None:
    with pytest.raises(DataError, match=said):
        records(path, split)


def test_two_sets_of_one_task_hold_out_problems_with_ids_of_their_own() -> None:
    easy, hard = (f"reasoning_gym:chain_sum?size=40&min_terms={terms}&max_terms={terms}" for terms in (2, 6))
    for count in (3, 100):
        config = DataConfig(path=[easy, hard], evaluation_count=count)
        held_out = load(config, seed=0, understand=understand).held_out
        ids = [one.id for part in held_out for one in part]
        assert len(set(ids)) == len(ids) == min(count, 8)
