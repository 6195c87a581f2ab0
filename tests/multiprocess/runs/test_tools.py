"""Runs whose attempts have several turns: every online algorithm, any lag, and engines of other packages."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from rlframe.tools.audit import main as audit
from tests.multiprocess.program import ROOT, Program, lines, run

pytestmark = pytest.mark.thorough
SETTINGS = {
    "steps": 2,
    "prompts_per_step": 4,
    "algorithm.group_size": 4,
    "data.evaluation_count": 4,
    "evaluation.every_steps": 0,
    "rollout.num_engines": 1,
    "checkpoint.export": "false",
    "logging.progress": "false",
    "logging.tensorboard": "false",
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo by state": {"algorithm.credit.by": "state", "algorithm.credit.discount": 0.95},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "gmpo": {},
    "sapo": {},
    "dppo": {},
    "clip_cov": {},
    "kl_cov": {"train.num_minibatches": 2},
    "rloo": {},
    "reinforce_plus_plus": {},
    "reinforce_plus_plus_baseline": {},
    "ppo": {},
    "on_policy_distillation": {"algorithm.reward_coefficient": 1.0, "teacher.path": "qwen3_moe_tiny_tools"},
}
ENGINES = {
    "vllm": {"rollout": "vllm", "rollout.max_model_len": 256, "data.max_prompt_tokens": 64},
    "sglang": {"rollout": "sglang", "rollout.max_model_len": 256, "data.max_prompt_tokens": 64},
}


def check(folder: Path, *, steps: int, gap_nats: float = 1e-4) -> None:
    """Checks that tools were called, that each step has learned, and that engine and trainer agree on every token."""
    found = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert all(line["environment/turns_mean"] > 1 and line["environment/tool_calls_mean"] > 0 for line in found)
    assert all(line["train/grad_norm"] > 0 and line["rollout/logprob_gap_max_nats"] < gap_nats for line in found)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_online_algorithm_learns_from_attempts_of_several_turns(tmp_path: Path, name: str) -> None:
    settings = SETTINGS | {"algorithm": name.split()[0]} | ALGORITHMS[name]
    if name in ("reinforce_plus_plus", "ppo"):
        del settings["algorithm.group_size"]
    check(run(tmp_path / "run", settings, config="grpo_calculator"), steps=2)


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_attempts_of_several_turns_go_on_at_any_lag_and_after_the_end_of_the_driver(tmp_path: Path, lag: int) -> None:
    settings = SETTINGS | {
        "steps": 6,
        "rollout.num_engines": 2,
        "cluster.colocate": "false",
        "loop.max_policy_lag": lag,
        "algorithm.correction.bypass": "true",
        "checkpoint.every_steps": 1,
        "weight_sync.hold": "host",
    }
    folder = tmp_path / "run"
    with Program(folder, settings, config="grpo_calculator", held=["step 3"]) as program:
        program.wait_for_step(3)
    assert audit([str(folder)]) == 0
    with Program(folder, settings, config="grpo_calculator") as program:
        assert program.finish() == 0, program.errors()
    assert audit([str(folder)]) == 0
    # A gap of stale weights is the lag's, and no fault.
    check(folder, steps=6, gap_nats=100.0)
    ended = [line for line in lines(folder / "ledger.jsonl") if line["event"] in ("trained", "dropped")]
    assert len({line["lease"] for line in ended}) == len(ended) >= 24


@pytest.mark.engine
@pytest.mark.parametrize("name", ENGINES)
def test_engines_of_other_packages_sample_several_turns(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    # SGLang may lie in a folder of its own.
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with Program(
        tmp_path / "run", SETTINGS | ENGINES[name], config="grpo_calculator", environment=environment, fresh=True
    ) as program:
        assert program.finish(600.0) == 0, program.errors()
    check(tmp_path / "run", steps=2, gap_nats=1e-3)
