"""Profiles of the main job on one GPU: kernels and gaps, allocations, and reports of nsys where it is installed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.program import QUICK, run

pytestmark = pytest.mark.gpu
ONE_GPU = QUICK | {
    "train": "cuda",
    "cluster": "cuda",
    "rollout.num_engines": 1,
    "steps": 2,
    "data.evaluation_count": 0,
    "profile.steps": "[2]",
}
ENGINES = {
    "transformers": {},
    # The quickest start that still has CUDA graphs: nothing is compiled, and the engine starts beside the policy.
    "vllm": {
        "rollout.compile": "false",
        "rollout.max_num_seqs": 8,
        "rollout.max_model_len": 128,
        "rollout.kv_cache_gb": 1,
        "rollout.sleep_level": 0,
    },
}


def processes(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "profiles" / "step_2" / "summary.json").read_text())["processes"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trace_has_the_kernels_of_trainer_and_engine(tmp_path: Path, engine: str) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm")
    found = processes(run(tmp_path / "run", ONE_GPU | ENGINES[engine] | {"rollout": engine}))
    for name in ("policy_0", "engines_0"):
        assert found[name]["kernels"] and 0 < found[name]["gpu_busy_fraction"] <= 1, found[name]
        assert found[name]["gaps"] is not None
    assert found["policy_0"]["phases"]["train"] > 0
    assert not found["driver"]["kernels"], "the driver computes nothing on the GPU"


def test_a_snapshot_has_the_allocations(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", ONE_GPU | {"profile.tool": "memory", "rollout": "transformers"})
    assert processes(folder).keys() == {"policy_0", "engines_0"}
    snapshot = folder / "profiles" / "step_2" / "policy_0.pickle"
    assert snapshot.stat().st_size > 10_000 and b"device_traces" in snapshot.read_bytes()


@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_nsys_writes_a_report_of_the_step(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", ONE_GPU | {"profile.tool": "nsys", "profile.roles": "[policy]"})
    (report,) = (folder / "profiles" / "nsys").glob("policy_0*.nsys-rep")
    assert report.stat().st_size > 10_000
