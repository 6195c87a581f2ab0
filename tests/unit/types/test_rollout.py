"""What SamplingParams and GenerationRequest refuse."""

import numpy as np
import pytest

from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import (
    Completion,
    FinishReason,
    GenerationRequest,
    Group,
    Rollout,
    SamplingParams,
    attempts_in,
    reward_of,
    rewards_of,
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be at least 0 \(0 is greedy\), got -0.1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must lie in \(0, 1\], got 1.1"),
        ({"top_k": -1}, r"top_k must be at least 0 \(0 keeps all tokens\), got -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must lie in \[0, max_tokens=4\], got 5"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_the_edges_of_the_ranges_are_allowed() -> None:
    # Must not raise.
    SamplingParams(temperature=0, top_p=1, top_k=0, max_tokens=1, min_tokens=1)


def request(tokens: int, first_position: int, max_tokens: int = 8) -> GenerationRequest:
    """A request whose input is 5, 6, 7, ..."""
    return GenerationRequest(
        input=ModelInput(range(5, 5 + tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        first_position=first_position,
    )


@pytest.mark.parametrize(("tokens", "first", "most"), [(4, -1, 8), (4, 4, 8), (4, 5, 8), (20, 8, 8), (20, 2, 2)])
def test_a_response_begun_is_shorter_than_the_input_and_than_the_whole(tokens: int, first: int, most: int) -> None:
    with pytest.raises(ValueError, match=rf"first_position must be .* {tokens} and {most}, got {first}"):
        request(tokens, first, most)


def test_what_is_begun_are_the_last_tokens_of_the_input() -> None:
    assert (request(4, 3).begun, request(4, 3).prompt_tokens) == ([6, 7, 8], 1)
    assert (request(4, 0).begun, request(4, 0).prompt_tokens) == ([], 4)
    assert request(20, 7).begun == list(range(18, 25))


def test_attempts_of_a_group_share_what_they_begin_with_until_one_has_a_response() -> None:
    first, second = Group.begin("g", Prompt(id="p", text="", input=ModelInput((1, 2, 3))), 2).rollouts
    assert first.loss_mask is second.loss_mask
    with pytest.raises(ValueError, match="read-only"):
        first.versions[0] = 7
    first.append(Completion(token_ids=[4], logprobs=[-0.5], versions=[7], finish_reason=FinishReason.STOP))
    assert (first.loss_mask.tolist(), second.loss_mask.tolist()) == ([False, False, False, True], [False] * 3)
    assert (first.versions.tolist(), second.versions.tolist()) == ([-1, -1, -1, 7], [-1] * 3)


def rollouts(rewards: list[float], sequences: list[int]) -> list[Rollout]:
    """Attempts of three tokens."""
    found = [
        Rollout.begin(Prompt(id="p", text="", input=ModelInput((1, 2, 3))), index) for index in range(len(rewards))
    ]
    for each, reward, sequence in zip(found, rewards, sequences, strict=True):
        each.reward, each.sequence = reward, sequence
    return found


def test_sequences_of_an_attempt_stay_together_and_others_stand_alone() -> None:
    alone = rollouts([0.0] * 3, [0, 0, 0])
    assert attempts_in(iter(alone)) == [[each] for each in alone]
    first, second, other = rollouts([0.0] * 3, [0, 1, 0])
    assert attempts_in([first, second, other]) == [[first, second], [other]]


def test_rewards_at_tokens_count_in_the_rewards_of_all_attempts() -> None:
    attempts = attempts_in(rollouts([1.0, 0.25, 0.5], [0, 0, 1]))
    assert rewards_of(attempts) == [1.0, 0.5]
    attempts[1][0].token_rewards = np.array([0.0, 2.0, 0.0], dtype=np.float32)
    assert rewards_of(attempts) == [1.0, 2.5] == [reward_of(own) for own in attempts]
