import pytest

from rlframe.rollout.base.config import RolloutConfig
from rlframe.rollout.transformers.engine import TransformersConfig
from rlframe.rollout.vllm.config import VllmConfig
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
        ({"stop": ["a", r"\n\n"]}, r"stop must hold the characters themselves, got \\n\\n: the command line keeps"),
        ({"num_engines": 3, "engines_per_device": 2}, "num_engines must be a multiple of engines_per_device=2, got 3"),
        ({"max_batch": 0}, "max_batch must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TransformersConfig(**values)


def test_engines_that_share_a_device_are_told_the_size_of_their_caches():
    shared = {"num_engines": 2, "engines_per_device": 2}
    assert VllmConfig(**shared, kv_cache_gb=1.0).num_devices == 1
    assert VllmConfig(num_engines=4, tp=2, engines_per_device=2, kv_cache_gb=1.0).num_devices == 4
    with pytest.raises(ValueError, match="engines_per_device needs kv_cache_gb, got 2"):
        VllmConfig(**shared)
