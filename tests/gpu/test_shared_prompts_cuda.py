"""Shared prompts with Transformer Engine's attention: gradients and logprobs of prompts computed apart, in bfloat16.

tests/gpu/test_gradient_matrix_cuda.py compares small ones with transformers.
"""

from typing import Any

import pytest
import torch

from rlframe.cluster.config import Device
from rlframe.megatron.config.options import Recompute
from rlframe.megatron.config.train import Dtype
from rlframe.megatron.messages.microbatch import split
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

pytestmark = pytest.mark.gpu
RESPONSES = (40, 300, 1, 129)
CASES = {"long": Case((1500, 700, 130, 9), RESPONSES), "short": Case((130, 9), RESPONSES)}
"""Prompts longer than what one kernel block holds, about as long as one, and shorter. The long ones are most of what
attention reads, so that they have a call of their own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make("qwen3", folder, max_position_embeddings=2048, **SIZES).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def exact(folder: str) -> dict[str, Any]:
    """Results in float32, of prompts computed apart."""
    return run_distributed(on_rank, 1, folder, Recompute.NONE, Device.CPU, Dtype.FLOAT32, CASES, ["plain"])[0]


@pytest.mark.parametrize("recompute", list(Recompute))
def test_gradients_and_logprobs_are_as_near_to_float32_as_those_of_prompts_computed_apart(
    recompute: Recompute, folder: str, exact: dict[str, Any]
) -> None:
    (found,) = run_distributed(on_rank, 1, folder, recompute, Device.CUDA, Dtype.BFLOAT16, CASES, timeout_s=300)
    for name, results in found.items():
        assert_as_near_to_float32(results, exact[name], name)
        plain, other, shared = results["plain"], results["other"], results["shared"]
        assert plain["calls"] == other["calls"] == NO_CALLS
        assert shared["calls"] == (expected_calls(recompute) if name == "long" else NO_CALLS), name


def test_two_calls_have_the_outputs_and_gradients_of_sequences_computed_apart() -> None:
    from rlframe.megatron.packed.fused_kernels import FusedKernels
    from rlframe.megatron.packed.inputs import PackedInputs
    from rlframe.megatron.packed.split_attention import SplitAttention
    from tests.unit.megatron.packed.plain_kernels import apart

    device, whole = torch.device("cuda"), CASES["long"].batch()
    (own,), _ = split(whole, whole.advantages, num_ranks=1, max_tokens=6000, share_prompts=True)
    (microbatch,) = own.microbatches()
    shared: Any = PackedInputs.of(microbatch.batch, 64).to(device).packing.shared_prompts
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, grad = (
        torch.randn(len(shared.positions), heads, 128, generator=generator, device=device) for heads in (4, 2, 2, 4)
    )
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float64, torch.bfloat16):
        # What the kernels do not write is no number.
        trash = [torch.full_like(query, torch.nan) for _ in range(20)]
        del trash
        inputs = [each.bfloat16().to(dtype).requires_grad_() for each in (query, key, value)]
        if dtype == torch.bfloat16:
            output = SplitAttention.apply(*inputs, shared.split, FusedKernels(128**-0.5))
        else:
            output = apart(*inputs, shared)
        gradients = torch.autograd.grad(output, inputs, grad.bfloat16().to(dtype))
        found[dtype] = [output.detach().double(), *(each.double() for each in gradients)]
    for mine, right in zip(found[torch.bfloat16], found[torch.float64], strict=True):
        # bfloat16 rounds by 2^-9 of a number at most, of which outputs and gradients have two or three.
        assert float((mine - right).norm() / right.norm()) < 0.01
