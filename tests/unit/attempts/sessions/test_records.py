"""What attempts keep of their turns for rewards and credit: how each ended, its calls of tools, its state."""

import copy
import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.environments.config import EnvironmentConfig, Verdict
from rlframe.rewards.judge.question import shown
from rlframe.rewards.runner import attempt_of
from rlframe.types.rollout import Rollout
from rlframe.types.turn import state_of_messages, state_of_name
from tests.unit.attempts.sessions.test_dialogue import CALCULATOR, FORGETFUL, HERE, attempted, thinks, words

pytestmark = pytest.mark.later

__all__ = ["words"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_each_turn_says_how_it_and_its_calls_ended(words: PreTrainedTokenizerBase) -> None:
    right, wrong = call("calculator", expression="1+1"), call("calculator", expression="1+")

    def policy(before: str) -> str:
        turns = before.count("<|assistant|>")
        no = "<tool_call>{no</tool_call>"
        return [right + wrong + right, no, no + right][turns - 1] + "<|end|>" * (turns < 3)

    config = EnvironmentConfig(
        name="tools", options={**CALCULATOR.options, "max_calls_per_turn": 2}, workers=1, max_tokens=1000
    )
    _, ended, _ = attempted(words, policy, config)
    (rollout,) = ended.group.rollouts
    first, second, third = rollout.records
    assert (first.finish_reason, first.calls, first.malformed) == ("stop", ("done", "failed", "not_done"), ())
    assert (second.finish_reason, second.calls) == ("stop", ()) and len(second.malformed) == 1
    # The last one reached its limit, so that its calls were not made. Those that cannot be read are known all the same.
    assert (third.calls, len(third.malformed)) == ((), 1)
    assert third.finish_reason == "length" and rollout.ending == "cut_off" and rollout.num_turns == 3


def test_a_turns_state_is_what_the_policy_was_shown_last(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", workers=1)
    _, ended, _ = attempted(words, lambda before: "stop<|end|>" if before.count("go") == 2 else "go<|end|>", config)
    (rollout,) = ended.group.rollouts
    assert [record.reward for record in rollout.records] == [1.0] * 3 and rollout.ending == "done"
    shown = [rollout.messages[:2], rollout.messages[3:4], rollout.messages[5:6]]
    assert [record.state for record in rollout.records] == [state_of_messages(each) for each in shown]
    assert len({record.state for record in rollout.records}) == 3


def test_an_environment_may_name_its_states(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Rooms", workers=1)
    _, ended, _ = attempted(words, lambda before: "stop<|end|>" if before.count("go") == 2 else "go<|end|>", config)
    (rollout,) = ended.group.rollouts
    assert [record.state for record in rollout.records[1:]] == [state_of_name("room 1"), state_of_name("room 0")]


def test_the_turn_at_which_an_environment_failed_says_so(words: PreTrainedTokenizerBase) -> None:
    config = EnvironmentConfig(name=f"{HERE}:Game", options={"fails": True}, workers=1, on_failure=Verdict.TRAIN)
    _, ended, _ = attempted(words, lambda before: "stop<|end|>", config)
    (rollout,) = ended.group.rollouts
    assert [record.trouble for record in rollout.records] == ["raised"] and rollout.ending == "raised"


@pytest.mark.parametrize(("name", "paid"), [("Unready", [1.0, 0.0]), ("Clinging", [1.0, 1.0])])
def test_an_attempt_that_is_judged_although_its_environment_failed_has_its_last_turn(
    words: PreTrainedTokenizerBase, name: str, paid: list[float]
) -> None:
    config = EnvironmentConfig(name=f"{HERE}:{name}", workers=1, on_failure=Verdict.TRAIN)
    _, ended, _ = attempted(words, lambda before: "stop<|end|>" if "go" in before else "go<|end|>", config)
    (rollout,) = ended.group.rollouts
    assert [each["content"] for each in rollout.messages if each["role"] == "assistant"] == ["go", "stop"]
    assert [record.trouble for record in rollout.records] == ["", "raised"] and rollout.ending == "raised"
    # What the game had paid before it failed counts.
    assert [record.reward for record in rollout.records] == paid and rollout.total_reward == sum(paid)
    assert shown(attempt_of(rollout))["question"] == "12*13="


def test_values_of_turns_lie_where_their_turns_end_in_whichever_sequence(words: PreTrainedTokenizerBase) -> None:
    forgetful = copy.deepcopy(words)
    forgetful.chat_template = FORGETFUL

    def judge(rollout: Rollout) -> None:
        rollout.reward_weights = {"by_turn": 10.0}
        rollout.turn_parts = {"by_turn": [float(turn) for turn in range(rollout.num_turns)]}

    config = EnvironmentConfig(name=f"{HERE}:Game", workers=1)
    rendering = RenderingConfig(history=History.FORK, reasoning="none")
    _, ended, _ = attempted(forgetful, thinks, config, rendering=rendering, judge=judge)
    sequences = ended.group.rollouts
    assert [(each.first_turn, each.num_turns, len(each.records)) for each in sequences] == [
        (0, 1, 3),
        (1, 2, 3),
        (2, 3, 3),
    ]
    sampled = sum(each.num_sampled_tokens for each in sequences)
    assert attempt_of(sequences[-1]).num_response_tokens == sampled > sequences[-1].num_sampled_tokens
    for place, each in enumerate(sequences):
        at_tokens = each.rewards_at_tokens
        ((_, end),) = each.turns
        # One of the game for each turn, and ten times its number.
        assert at_tokens is not None and at_tokens.sum() == at_tokens[end - 1] == 1.0 + 10 * place


@pytest.mark.parametrize("size", [3])
def test_a_group_is_judged_together_when_its_last_attempt_is_over(words: PreTrainedTokenizerBase, size: int) -> None:
    bench, ended, _ = attempted(words, lambda before: "stop<|end|>", EnvironmentConfig(name=f"{HERE}:Game"), size=size)
    assert [len(judged) for judged in bench.judged_together] == [size] and len(bench.judged) == size
    assert bench.judged_together[0] == ended.group.rollouts
