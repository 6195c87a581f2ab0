"""The main job with SGLang as its engine, on the CPU: direct copies, proved, probed; and a scheduler that dies."""

import importlib.util
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_vllm import PATIENCE_S, has_trained, title
from tests.multiprocess.program import LEARNING, ROOT, Program, lines, on_loopback

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]
SETTINGS = LEARNING | {
    "rollout": "sglang",
    "rollout.num_engines": 1,
    "rollout.max_model_len": 128,
    "steps": 6,
    "train.optimizer.lr": 1e-3,
    "train.moe.router_replay": "true",
    "weight_sync.probe_every_steps": 2,
}


@pytest.mark.thorough
def test_the_main_job_learns_with_sglang_and_outlives_its_scheduler(tmp_path: Path) -> None:
    paths = os.environ.get("PYTHONPATH", "")
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{paths}"}
    with Program(tmp_path / "run", SETTINGS, environment=environment, fresh=True, held=["step 1"]) as program:
        program.wait_for(lambda: has_trained(program), patience_s=PATIENCE_S, every_s=0.1)
        schedulers = [process for process in program.children if is_scheduler(process)]
        assert schedulers, [title(process) for process in program.children]
        doors = program.doors()
        assert any("sglang::scheduler" in title for title, _ in doors)
        assert {door: address for door, address in doors.items() if not on_loopback(address)} == {}
        os.kill(schedulers[0].pid, signal.SIGKILL)
        program.go_on("step 1")
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
        assert "transport shm: every rank is on the CPU of one host" in program.errors()
        assert "restarting engine 0 (restart 1 of rollout.max_restarts=3): " in program.errors()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    steps = [line for line in found if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert steps[-1]["rollout/engine_restarts"] == 1
    # Float32 on both sides, with weights that change at every step: a stale engine would be off by far more.
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-3 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    # One update a step, by the weights that sampled: only near ties fall differently.
    assert all(line["moe/routes_differ_fraction"] < 0.01 for line in steps)
    probes = [line for line in found if "weight_sync/probe_mean_nats" in line]
    assert all(line["weight_sync/probe_mean_nats"] < 1e-4 for line in probes)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {version for line in samples if line["step"] == 6 for version in line["versions"]} <= {5, 6}


def is_scheduler(process: psutil.Process) -> bool:
    """Whether it is SGLang's scheduler, by the title it gives itself."""
    return "sglang::scheduler" in title(process)
