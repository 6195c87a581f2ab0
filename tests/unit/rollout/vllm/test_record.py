import numpy as np
import torch

from rlframe.rollout.vllm.sampling.record import FIRST_WIDTH, NOT_RECORDED, TokenRecord


def step(record: TokenRecord, *samples: tuple[tuple[int, int], int, int], sampled: tuple[bool, ...] = ()) -> None:
    """Adds a step of samples: place of the request, index of the token in the response, token. Token 5 has logprob
    -0.5."""
    rows, owners = np.array([place for place, _, _ in samples]).T
    tokens = torch.tensor([token for _, _, token in samples])
    record.add(
        rows,
        owners,
        np.array([index for _, index, _ in samples]),
        np.array(sampled or [True] * len(samples)),
        tokens=tokens,
        logprobs=-tokens / 10,
    )


def took(record: TokenRecord, key: str, count: int = 1000) -> list[int]:
    tokens, logprobs = record.take(key, count)
    np.testing.assert_array_equal(logprobs, -tokens.astype(np.float32) / np.float32(10))
    return tokens.tolist()


def test_tokens_of_requests_that_share_steps_are_told_apart():
    record = TokenRecord(2)
    a, b = record.begin("a"), record.begin("b")
    step(record, (a, 0, 5), (b, 0, 6))
    step(record, (b, 1, 7), (a, 1, 8))
    assert took(record, "a") == [5, 8] and took(record, "b") == [6, 7]
    assert len(record) == 0 and took(record, "a") == []


def test_tokens_beyond_those_that_were_returned_are_left_out():
    record = TokenRecord(1)
    a = record.begin("a")
    for index in range(3):
        step(record, (a, index, index + 5))
    assert took(record, "a", 2) == [5, 6]


def test_prompts_that_are_not_at_their_end_and_requests_without_a_record_add_nothing():
    record = TokenRecord(1)
    a = record.begin("a")
    step(record, (a, 0, 3), (NOT_RECORDED, 0, 4), sampled=(False, True))
    assert took(record, "a") == []


def test_a_preempted_request_keeps_its_tokens_and_samples_the_dropped_one_again():
    record = TokenRecord(1)
    a = record.begin("a")
    step(record, (a, 0, 5))
    step(record, (a, 1, 6))
    assert record.begin("a") == a
    step(record, (a, 1, 7))
    step(record, (a, 2, 8))
    assert took(record, "a") == [5, 7, 8]


def test_a_step_of_a_request_before_does_not_reach_the_next_one_in_its_row():
    record = TokenRecord(1)
    before = record.begin("a")
    record.take("a", 0)
    after = record.begin("b")
    assert after[0] == before[0] and after != before
    step(record, (before, 0, 5))
    step(record, (after, 0, 6))
    assert took(record, "b") == [6]


def test_a_request_that_was_taken_has_no_record_when_a_step_begins_with_it():
    """It was aborted before its first step, or vLLM has preempted it when a stop string ends it."""
    record = TokenRecord(1)
    assert took(record, "waiting") == []
    assert record.begin("waiting") == NOT_RECORDED
    a = record.begin("a")
    step(record, (a, 0, 5))
    assert took(record, "a", 1) == [5]
    again = record.begin("a")
    step(record, (again, 1, 6))
    assert again == NOT_RECORDED and len(record) == 0


def test_nothing_follows_a_token_that_is_missing():
    record = TokenRecord(1)
    a = record.begin("a")
    step(record, (a, 0, 5))
    step(record, (a, 2, 7))
    assert took(record, "a") == [5]


def test_there_is_room_for_more_requests_and_longer_responses_than_at_first():
    record = TokenRecord(1)
    places = [record.begin(str(number)) for number in range(5)]
    for index in range(2 * FIRST_WIDTH + 1):
        step(record, *((place, index, index + number) for number, place in enumerate(places)))
    for number in range(5):
        assert took(record, str(number)) == list(range(number, number + 2 * FIRST_WIDTH + 1))
