"""What SamplingParams refuses."""

import pytest

from rlframe.types.rollout import SamplingParams


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
