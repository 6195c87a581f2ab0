"""Attention to long shared prompts in a call of its own, in whole passes of a trainer;
tests/gpu/test_shared_prompts_cuda.py has the same with the kernels of a GPU."""

import pathlib

import pytest

from rlframe.cluster.config import Device
from rlframe.megatron.config.options import Recompute
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.shared_passes import NO_CALLS, SIZES, Case, expected_calls, on_rank
from tests.tiny_models import make

RESPONSES = (4, 30, 1, 12)
CASES = {"long": Case((150, 70, 13, 9), RESPONSES), "short": Case((13, 9), RESPONSES)}
"""Prompts that are most of what attention reads, and others."""


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", list(Recompute))
def test_passes_that_split_attention_have_the_gradients_of_prompts_computed_apart(
    recompute: Recompute, tmp_path: pathlib.Path
) -> None:
    make("qwen3", tmp_path, max_position_embeddings=256, **SIZES)
    (found,) = run_distributed(on_rank, 1, str(tmp_path), recompute, Device.CPU, CASES)
    for name, results in found.items():
        plain, shared = results["plain"], results["shared"]
        for what in ("logprobs", "gradient"):
            assert (shared[what] - plain[what]).norm() < 2e-6 * plain[what].norm(), f"{what} of {name} prompts"
        assert plain["calls"] == results["other"]["calls"] == NO_CALLS
        assert shared["calls"] == (expected_calls(recompute) if name == "long" else NO_CALLS)
