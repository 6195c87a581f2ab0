"""Triton's kernels by its interpreter, in a process of their own: it must be asked for before Triton is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.meta.checkout import ROOT

FILES = {
    "triton": (
        "weight_sync/interpreted/kernels.py",
        "models/interpreted/fp8.py",
        "megatron/adam/interpreted/optimizers.py",
        "megatron/adam/interpreted/step.py",
        "megatron/vocab/interpreted/divergence.py",
        "megatron/vocab/interpreted/vocab.py",
        "megatron/model/interpreted/experts/gradients.py",
        "megatron/model/interpreted/experts/operation.py",
        "megatron/model/interpreted/experts/order.py",
        "megatron/model/interpreted/query_key.py",
        "megatron/model/interpreted/swiglu.py",
        "megatron/packed/interpreted/rows.py",
        "megatron/packed/interpreted/split.py",
        "rollout/vllm/interpreted/between.py",
        "rollout/vllm/interpreted/few_rows.py",
        "rollout/vllm/interpreted/gumbel.py",
        "rollout/vllm/interpreted/one_pass.py",
        "rollout/vllm/interpreted/rotary.py",
        "rollout/vllm/interpreted/shared_prompts.py",
    ),
    "fla": ("megatron/packed/interpreted/delta.py",),
}
"""By the module that they need, which needs Triton."""


@pytest.mark.parametrize("module", FILES)
def test_kernels_through_tritons_interpreter(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    passes(["-m", "not thorough", *(str(ROOT / "tests/unit" / file) for file in FILES[module])])


@pytest.mark.thorough
def test_steps_of_more_layouts() -> None:
    passes(["-m", "thorough", str(ROOT / "tests/unit/megatron/adam/interpreted/optimizers.py")])


CUTS = "shared and d1 and grpo or d1c2 and a2a and not d1c2p2 or d1t2 and float32 and not recompute"
"""Cells of the gradient matrix: shared prompts, sequences and heads cut among ranks, stages, dynamic and not."""


@pytest.mark.thorough
def test_gradients_with_the_kernel_of_queries_and_keys() -> None:
    """`gradients.ranks` puts the GPU's attention into the layers of these processes."""
    passes([str(ROOT / "tests/multiprocess/megatron/test_gradient_matrix.py"), "-k", CUTS])


def passes(arguments: list[str]) -> None:
    """Runs pytest on what it is given."""
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
