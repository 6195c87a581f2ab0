"""Attention to long shared prompts in a call of its own, in whole passes of a trainer;
tests/gpu/test_shared_prompts_cuda.py has the same with the kernels of a GPU."""

import pathlib

import pytest
import torch

from rlframe.cluster.config import Device
from rlframe.megatron.config.options import Recompute
from rlframe.megatron.config.train import Dtype
from tests.multiprocess.distributed import run_distributed
from tests.multiprocess.megatron.shared_passes import (
    NO_CALLS,
    SIZES,
    Case,
    assert_as_near_to_float32,
    expected_calls,
    on_rank,
)
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
    (found,) = run_distributed(on_rank, 1, str(tmp_path), recompute, Device.CPU, Dtype.FLOAT32, CASES)
    for name, results in found.items():
        plain, shared = results["plain"], results["shared"]
        for what in ("logprobs", "gradient"):
            assert (shared[what] - plain[what]).norm() < 2e-6 * plain[what].norm(), f"{what} of {name} prompts"
        assert plain["calls"] == results["other"]["calls"] == NO_CALLS
        assert shared["calls"] == (expected_calls(recompute) if name == "long" else NO_CALLS)


@pytest.mark.thorough
def test_passes_in_bfloat16_are_as_near_to_float32_as_those_of_prompts_computed_apart(tmp_path: pathlib.Path) -> None:
    make("qwen3", tmp_path, max_position_embeddings=256, **SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    arguments = (1, str(tmp_path), Recompute.NONE, Device.CPU)
    (exact,) = run_distributed(on_rank, *arguments, Dtype.FLOAT32, CASES, ["plain"])
    (found,) = run_distributed(on_rank, *arguments, Dtype.BFLOAT16, CASES)
    assert found["long"]["shared"]["calls"] != NO_CALLS
    for name, results in found.items():
        assert_as_near_to_float32(results, exact[name], name)
