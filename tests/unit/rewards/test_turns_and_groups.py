"""Rewards by turn and by group, and limits of their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlframe.ops.packing import pack
from rlframe.rewards.config import Per, RewardConfig, RewardTerm
from rlframe.rewards.runner import RewardRunner
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import Completion, FinishReason, Group, Rollout
from rlframe.types.turn import TurnRecord
from rlframe.utils.errors import ConfigError
from tests.campaigns.rewards import rollout

pytestmark = pytest.mark.later

CODE = """
import time
from dataclasses import dataclass
from rlframe.rewards.base import Reward
from rlframe.rewards.config import Per

@dataclass(kw_only=True, slots=True)
class Settings:
    bonus: float = 0.0

class Statuses(Reward):
    per = frozenset(Per)
    def __init__(self, config: Settings):
        self.bonus = config.bonus
    def score(self, attempt):
        return [float(turn.calls.count("done")) + self.bonus for turn in attempt.turns]
    def score_group(self, attempts):
        return [[float(len(attempts))] * attempt.num_turns for attempt in attempts]

def longest(responses, answer):
    return [float(len(each) == max(map(len, responses))) for each in responses]

def too_few(responses, answer):
    return [1.0]

def text(responses, answer):
    return "x" * len(responses)

def sleepy(response, answer):
    time.sleep(30 if response == "slow" else 0)
    return 1.0
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(CODE)
    return str(tmp_path / "mine.py")


def attempt(index: int, *calls: tuple[str, ...]) -> Rollout:
    """An attempt of turns of two tokens, which made calls that ended so."""
    made = Rollout.begin(Prompt(id="p", text="", input=ModelInput((1, 2))), index)
    for place, ends in enumerate(calls):
        if place:
            made.observe([9])
        made.append(Completion(token_ids=[5, 6], logprobs=[-1, -1], versions=[0, 0], finish_reason=FinishReason.STOP))
        made.records = (*made.records, TurnRecord(finish_reason="stop", calls=ends))
    return made


def test_a_value_for_each_turn_lies_at_the_last_token_of_its_turn(file: str) -> None:
    rollouts = [attempt(0, ("done", "done"), ("failed",), ("done",)), attempt(1, ("done",))]
    parts = {"calls": RewardTerm(name=f"{file}:Statuses", weight=0.5), "one": RewardTerm(name=f"{file}:sleepy")}
    with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
        runner.score(rollouts)
    first, second = rollouts
    assert first.turn_parts == {"calls": [2.0, 0.0, 1.0]} and second.turn_parts == {"calls": [1.0]}
    # 0.5 * (2 + 0 + 1) at tokens, and 1 for all of it.
    assert (first.reward, first.total_reward) == (1.0, 2.5) and first.reward_parts == {"calls": 3.0, "one": 1.0}
    assert first.rewards_at_tokens is not None
    assert first.rewards_at_tokens.tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0.5]
    batch = pack([Group(id="g", prompt=first.prompt, rollouts=rollouts)])
    assert batch.token_rewards is not None and batch.token_rewards[-4:].tolist() == [0, 0, 0, 0.5]
    # The part by turn is among the rewards at tokens, not one of the parts of whole attempts.
    assert batch.reward_parts is not None and batch.reward_parts.isnan().tolist() == [[True, False]] * 2


def test_a_rollout_with_values_of_turns_only_is_scored(file: str) -> None:
    one = attempt(0, ("done",))
    with RewardRunner(RewardConfig(parts={"calls": RewardTerm(name=f"{file}:Statuses")}, workers=1)) as runner:
        runner.score([one])
    assert (one.reward, one.total_reward) == (0.0, 1.0)


def test_as_many_values_as_turns(file: str) -> None:
    (Path(file).parent / "wrong.py").write_text("def two(response, answer):\n    return [1.0, 2.0]\n")
    one, two = attempt(0, ()), attempt(1, (), ())
    parts = {"two": RewardTerm(name=f"{Path(file).parent}/wrong.py:two")}
    with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
        runner.score([one, two])
    assert one.reward_failed and not two.reward_failed and two.total_reward == 3.0
    assert one.reward_troubles == {"two": "failed"} and two.reward_troubles == {}


def test_a_reward_per_group_sees_all_attempts_and_comes_after_the_others(file: str) -> None:
    rollouts = [rollout(0, "good"), rollout(0, "longer"), rollout(0, "short!")]
    parts = {
        "longest": RewardTerm(name=f"{file}:longest", per=Per.GROUP, weight=2.0),
        "right": RewardTerm(name="exact_match"),
        "size": RewardTerm(name=f"{file}:Statuses", per=Per.GROUP),
    }
    with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
        for _ in range(2):  # again, from the start
            runner.score(rollouts)
            assert [one.reward for one in rollouts] == [1.0, 0.0, 0.0]
            runner.score_groups([rollouts])
            assert [one.reward for one in rollouts] == [1.0, 2.0, 2.0]
            assert [one.total_reward for one in rollouts] == [4.0, 5.0, 5.0]
            assert rollouts[0].reward_parts == {"longest": 0.0, "right": 1.0, "size": 3.0}


@pytest.mark.parametrize("function", ["too_few", "text"])
def test_a_reward_per_group_that_gives_something_else_fails_for_all_of_the_group(file: str, function: str) -> None:
    groups = [[rollout(0, "good"), rollout(0, "bad")], [rollout(1, "good"), rollout(1, "bad")]]
    parts = {"odd": RewardTerm(name=f"{file}:{function}", per=Per.GROUP), "right": RewardTerm(name="exact_match")}
    with RewardRunner(RewardConfig(parts=parts, workers=1)) as runner:
        runner.score([one for group in groups for one in group])
        runner.score_groups(groups)
        assert runner.failures == {"odd": 4, "right": 0}
    for group in groups:
        assert [one.reward for one in group] == [1.0, 0.0] and all(one.reward_failed for one in group)


def test_a_reward_that_cannot_see_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward.parts.it.per must be attempt for the reward exact_match, got group"):
        RewardRunner(RewardConfig(parts={"it": RewardTerm(name="exact_match", per=Per.GROUP)}))


def test_each_part_has_its_own_limit(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.rewards.runner.FIRST_CALL_S", 0.0)
    slow = [replace(rollout(index, "slow")) for index in range(2)]
    parts = {
        "short": RewardTerm(name=f"{file}:sleepy", timeout_s=0.3),
        "right": RewardTerm(name="exact_match"),
    }
    with RewardRunner(RewardConfig(parts=parts, timeout_s=600, workers=2)) as runner:
        runner.score(slow)
    assert runner.failures == {"short": 2, "right": 0}
