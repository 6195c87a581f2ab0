"""Triton's kernels by its interpreter, in a process of their own: it must be asked for before Triton is imported."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.meta.checkout import ROOT


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", ["weight_sync/interpreted/kernels.py", "megatron/vocab/interpreted/vocab.py"])
def test_kernels_through_tritons_interpreter(file: str) -> None:
    path = ROOT / "tests/unit" / file
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
