"""Triton's kernels by its interpreter, in a process of their own: it must be asked for before Triton is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.meta.checkout import ROOT

FILES = {
    "weight_sync/interpreted/kernels.py": "triton",
    "models/interpreted/fp8.py": "triton",
    "megatron/vocab/interpreted/vocab.py": "triton",
    "megatron/model/interpreted/swiglu.py": "triton",
    "megatron/packed/interpreted/delta.py": "fla",
}
"""And the module that each needs, which needs Triton."""


@pytest.mark.parametrize("file", FILES)
def test_kernels_through_tritons_interpreter(file: str) -> None:
    if importlib.util.find_spec(FILES[file]) is None:
        pytest.skip(f"{FILES[file]} is not installed")
    path = ROOT / "tests/unit" / file
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
