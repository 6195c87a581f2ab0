"""The benchmark of rollouts beside vLLM's own generate: all of its cases with a tiny model on the CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "examples/benchmarks/rollout_vs_engine.py"


@pytest.mark.engine
@pytest.mark.thorough
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_every_case_runs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, SCRIPT, "tiny", "--device", "cpu", "--repeats", "1", "--output", output]
    subprocess.run(list(map(str, command)), check=True)
    result = json.loads(output.read_text())
    changed = ["rlframe_one_process", "rlframe_unshared", "rlframe_two_steps", "rlframe_cublas"]
    changed += ["rlframe_at_once", "rlframe_vllms_runner"]
    assert list(result["cases"]) == ["offline", "offline_seeded", "async", "rlframe", "rlframe_logprobs", *changed]
    assert all(case["seconds"] > 0 for case in result["cases"].values())
    seconds = [result["cases"][name]["seconds"] for name in ("offline", "rlframe")]
    assert result["ratios"]["rlframe"] == seconds[0] / seconds[1]
