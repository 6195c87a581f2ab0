import pytest

from rlframe.rollout.base.config import RolloutConfig
from rlframe.rollout.transformers.engine import TransformersConfig
from rlframe.types.rollout import SamplingParams


def test_sampling_follows_the_config():
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, min_tokens=3, stop=["."])
    assert config.sampling() == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, min_tokens=3, stop=(".",)
    )


def test_greedy_sampling_keeps_the_stops_and_drops_what_shapes_the_draw():
    config = RolloutConfig(temperature=0.7, top_p=0.9, top_k=5, max_tokens=7, min_tokens=7, stop=["."])
    assert config.sampling(greedy=True) == SamplingParams(temperature=0.0, max_tokens=7, stop=(".",))
    assert config.sampling(greedy=True, max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_engines": 0}, "num_engines must be at least 1, got 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_p": 0.0}, "top_p must be above 0, got 0.0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must lie in \[0, max_tokens=4\], got 5"),
        ({"stop": ["a", ""]}, "stop must not hold an empty string"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TransformersConfig(**values)
