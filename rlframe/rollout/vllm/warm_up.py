"""The requests with which vLLM warms up its sampler, in its worker."""

from typing import Any

from rlframe.types.rollout import SamplingParams


def warm_up_values(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the values of vLLM's SamplingParams that decide which kernels a run's requests and scores need."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        # Whether there is a least length decides, not how many tokens it is: vLLM's own limit of a warm-up is 16.
        "min_tokens": min(sampling.min_tokens, 1),
        "seed": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
    }


def warm_up_with(values: dict[str, Any]) -> None:
    """Makes vLLM warm up its sampler with requests like those of the run.

    vLLM 0.26 to 0.32 use every feature that there is, so that Triton compiles kernels of penalties, biases, forbidden
    words and others that a run never needs: 12 s on a machine without caches.
    """
    from vllm import SamplingParams as Parameters

    assert callable(getattr(Parameters, "for_sampler_warmup", None)), "vLLM 0.26 to 0.32 have it"
    Parameters.for_sampler_warmup = staticmethod(lambda: Parameters(**values))
