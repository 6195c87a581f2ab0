"""What SamplingParams and GenerationRequest refuse."""

import pytest

from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams


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
