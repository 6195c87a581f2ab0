"""The requests with which vLLM warms up its sampler."""

import pytest

from rlframe.rollout.vllm.warm_up import warm_up_values
from rlframe.types.rollout import SamplingParams

vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


@pytest.mark.parametrize("min_tokens", [0, 1, 512])
def test_vllm_takes_the_values_of_a_run_whose_answers_have_a_least_length(min_tokens: int) -> None:
    values = warm_up_values(SamplingParams(max_tokens=1024, min_tokens=min_tokens))

    assert vllm.SamplingParams(**values).min_tokens == min(min_tokens, 1)
