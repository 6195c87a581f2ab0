"""The main job with vLLM in the place of the embedded engine, on the CPU: weights by stream, proved, probed."""

import importlib.util
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.recipes import make_model
from tests.mtp_models import make_served
from tests.multiprocess.program import LEARNING, Program, lines, on_loopback

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
PATIENCE_S = 600.0
"""vLLM alone takes a minute or two to start on two cores."""
CORE_S = 60.0
"""Less than a held step waits. Rarely no core was found; this tells what there was."""
SETTINGS = LEARNING | {
    "rollout": "vllm",
    "rollout.num_engines": 1,
    "rollout.max_model_len": 128,
    "steps": 3,
    "train.optimizer.lr": 1e-3,
    "train.moe.router_replay": "true",
    "weight_sync.probe_every_steps": 1,
}


def test_the_main_job_learns_with_vllm_and_what_it_samples_is_what_the_trainer_computes(tmp_path: Path) -> None:
    with Program(tmp_path / "run", SETTINGS, fresh=True, held=["step 1"]) as program:
        program.wait_for(lambda: has_trained(program), patience_s=PATIENCE_S, every_s=0.1)
        deadline = time.monotonic() + CORE_S
        while not [title for title, _ in program.doors() if "EngineCore" in title]:
            assert time.monotonic() < deadline, f"no core listens: {program.doors()}; running: {titles(program)}"
            time.sleep(0.1)
        doors = program.doors()
        program.go_on("step 1")
        assert {door: address for door, address in doors.items() if not on_loopback(address)} == {}
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
        assert "transport reload over shm: engine 0 keeps " in program.errors()
        assert "restarting engine" not in program.errors(), program.errors()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    steps = [line for line in found if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    # Float32 on both sides, with weights that change at every step: a stale engine would be off by far more.
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-3 for line in steps)
    assert all(line["train/grad_norm"] > 0 for line in steps)
    # By the weights that sampled: only near ties fall differently.
    assert all(line["moe/routes_differ_fraction"] < 0.01 for line in steps)
    probes = [line for line in found if "weight_sync/probe_mean_nats" in line]
    assert [line["step"] for line in probes] == [0, 1, 2, 3]
    assert all(line["weight_sync/probe_mean_nats"] < 1e-4 for line in probes)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {version for line in samples if line["step"] == 3 for version in line["versions"]} == {2, 3}


def titles(program: Program) -> list[tuple[int, str]]:
    """The processes under it."""
    found = []
    for each in program.started():
        with suppress(psutil.NoSuchProcess):
            found.append((each.pid, " ".join(each.cmdline())[:80]))
    return found


@pytest.mark.thorough
def test_a_core_that_is_killed_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    settings = SETTINGS | {"steps": 8, "weight_sync.probe_every_steps": 2}
    with Program(tmp_path / "run", settings, fresh=True, held=["step 1"]) as program:
        program.wait_for(lambda: has_trained(program), patience_s=PATIENCE_S, every_s=0.1)
        cores = [process for process in program.children if "EngineCore" in process.name() + title(process)]
        assert cores, [title(process) for process in program.children]
        os.kill(cores[0].pid, signal.SIGKILL)
        program.go_on("step 1")
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
        assert "restarting engine 0 (restart 1 of rollout.max_restarts=3): " in program.errors()
    steps = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[-1]["rollout/engine_restarts"] == 1
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-3 for line in steps)


def has_trained(program: Program) -> bool:
    """Whether a step is done."""
    return any("train/loss" in line for line in lines(program.folder / "metrics.jsonl"))


def title(process: psutil.Process) -> str:
    """What the process calls itself."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.thorough
def test_adapters_alone_reach_vllm_in_place_and_it_computes_what_the_trainer_does(tmp_path: Path) -> None:
    folder = make_model("Qwen/Qwen3-4B", tmp_path / "model", shrunk=True)
    # vLLM's attention on a CPU begins with heads of 32 channels.
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config))
    adapters = {
        "model.path": folder,
        "train.parallel": "d1t2",
        "train.lora.rank": 4,
        "train.lora.target_modules": "[q_proj,v_proj,o_proj,gate_proj,down_proj]",
        "train.optimizer.lr": 1e-2,
        "weight_sync.lora": "adapter",
        "train.moe.router_replay": "false",
        "weight_sync.audit_every_steps": 1,
    }
    with Program(tmp_path / "run", SETTINGS | adapters, fresh=True) as program:
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
        assert "transport shm: " in program.errors()
    found = lines(tmp_path / "run" / "metrics.jsonl")
    steps = [line for line in found if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-4 and line["train/grad_norm"] > 0 for line in steps)
    # A and B of 2 layers in float32; 32 in, 64 out of q and v and into o, 48 wide in between.
    assert {line["weight_sync/bytes"] for line in steps} == {2 * 4 * 4 * (3 * (32 + 64) + 2 * (32 + 48))}
    probes = [line["weight_sync/probe_mean_nats"] for line in found if "weight_sync/probe_mean_nats" in line]
    assert len(probes) == 4 and max(probes) < 1e-4


@pytest.mark.thorough
def test_a_model_is_evaluated_with_vllm_and_no_trainer(tmp_path: Path) -> None:
    kept = ("rollout", "rollout.num_engines", "rollout.max_model_len", "data.max_prompt_tokens", "logging.progress")
    settings = {key: SETTINGS[key] for key in kept} | {"mode": "evaluate", "data.evaluation_count": 16}
    with Program(tmp_path / "run", settings, fresh=True) as program:
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
        # Its loader cannot be recorded on a CPU, so that there is nothing to compare.
        assert "the weights of all engines are not proved: an engine keeps " in program.errors()
    results = json.loads((tmp_path / "run" / "evaluate" / "results.json").read_text())
    # The embedded model half knows arithmetic.
    assert 0.2 < results["sets"]["held_out"]["metrics"]["reward_mean"] < 0.8


@pytest.mark.thorough
def test_a_head_that_the_run_trains_drafts_ever_better(tmp_path: Path) -> None:
    settings = SETTINGS | {
        "model.path": make_served("glm4_moe", tmp_path / "model"),
        "model.random_init": "false",
        "train.parallel": "d1",
        "train.moe.router_replay": "false",
        "train.mtp.mode": "train",
        "train.mtp.loss_scaling_factor": 1.0,
        # Which random answers do not earn: the policy stays, and the head catches up.
        "reward.parts.exact_match.name": "exact_match",
        "train.optimizer.lr": 5e-3,
        "train.optimizer.warmup_steps": 1,
        "rollout.speculative.method": "mtp",
        "rollout.speculative.num_tokens": 1,
        "rollout.temperature": 0.5,
        "rollout.max_tokens": 32,
        "prompts_per_step": 16,
        "steps": 6,
    }
    with Program(tmp_path / "run", settings, fresh=True) as program:
        assert program.process.wait(PATIENCE_S) == 0, program.errors()
    steps = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    accepted = [line["rollout/draft_accepted_fraction"] for line in steps]
    assert accepted[0] < 0.06 and max(accepted[-2:]) > max(2 * accepted[0], 0.1), accepted
    assert steps[-1]["train/mtp_loss"] < steps[0]["train/mtp_loss"]
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-3 for line in steps)
