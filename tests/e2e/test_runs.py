"""Whole programs, as a user starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.program import LEARNING, QUICK, ROOT, lines, run

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="no ../shared/data beside this checkout")
def test_gsm8k_goes_through_loading_templating_generation_math_verify_and_an_update(tmp_path: Path) -> None:
    settings = QUICK | {
        "data": "gsm8k",
        "reward": "math",
        "data.path": f"{GSM8K}#64",
        "data.max_prompt_tokens": 1024,
        "steps": 3,
        "rollout.max_tokens": 32,
        "rollout.num_engines": 1,
        "logging.samples_per_step": 1,
    }
    folder = tmp_path / "run"
    run(folder, settings)
    steps = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    # A random model earns nothing; what counts is that math-verify judged every answer.
    assert all(line["reward/failed_fraction"] == 0.0 and "reward/math_mean" in line for line in steps)
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-4 for line in steps)
    sample = lines(folder / "samples.jsonl")[-1]
    assert "Solve the problem step by step" in sample["prompt"]
    assert sample["answer"].lstrip("-").replace(",", "").replace(".", "").isdigit()
    assert (folder / "model" / "model.safetensors").is_file()


@pytest.mark.thorough
def test_dapo_fills_its_batches_with_groups_that_have_a_signal(tmp_path: Path) -> None:
    settings = LEARNING | {
        "algorithm": "dapo",
        "algorithm.group_size": 2,
        "algorithm.correction.weight": "token",
        "algorithm.correction.weight_cap": 2.0,
        "train.num_minibatches": 2,
        "train.moe.router_replay": "true",
        "steps": 4,
        # A random model's answers of two tokens, of which one in two earns a reward by the parity of its length.
        "rollout.max_tokens": 2,
        "algorithm.mask_truncated": "false",
        "checkpoint.export": "false",
    }
    folder = run(tmp_path / "run", settings)
    steps = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(
        line["reward/flat_groups_fraction"] == 0.0 and line["train/steps_without_advantage"] == 0 for line in steps
    )
    reasons = ("all_right", "all_wrong", "other", "left_over")
    dropped = [sum(line[f"rollout/dropped_{reason}_groups"] for reason in reasons) for line in steps]
    assert [line["rollout/sampled"] / 2 for line in steps] == [4 + each for each in dropped]
    assert sum(dropped) > 0 and max(line["rollout/rounds"] for line in steps) > 1
    assert all(line["train/grad_norm"] > 0 and 0.99 < line["rollout/effective_fraction"] <= 1 for line in steps)
    # The engine samples with the trainer's weights in float32: it is the first update of a step that has the trainer
    # choose other experts here and there in the second, where the engine's are replayed all the same.
    assert 0 < max(line["moe/routes_differ_fraction"] for line in steps) < 0.1
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-5 for line in steps)
    # Four prompts a step were trained on, all different, and the cursor went past those that were dropped.
    samples = [line for line in lines(folder / "samples.jsonl") if line["step"] and line["versions"][0] < line["step"]]
    assert len({line["id"] for line in samples}) == 16
    (state,) = (folder / "checkpoints").glob("*/state.json")
    assert json.loads(state.read_text())["data"]["position"] == 16 + sum(dropped)


@pytest.mark.thorough
def test_a_sweep_trains_each_job_and_compares_them_in_a_table(tmp_path: Path) -> None:
    settings = LEARNING | {"steps": 2, "checkpoint.export": "false"}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "rlframe.main", "-m", "algorithm=grpo,rloo", "train.lr=1e-3", *overrides],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    head, *rows, shared = done.stdout.splitlines()[-4:]
    assert head.split() == ["overrides", "exact_match", "reward", "response_tokens", "seconds", "output"]
    for number, (row, algorithm) in enumerate(zip(rows, ("grpo", "rloo"), strict=True)):
        folder = tmp_path / "outputs" / "grpo_qwen3_moe" / str(number)
        assert row.split()[0] == f"algorithm={algorithm}" and row.endswith(str(folder.relative_to(tmp_path)))
        written = lines(folder / "metrics.jsonl")
        assert [line["step"] for line in written if line.get("train/grad_norm", 0) > 0] == [1, 2]
        last = [line for line in written if "evaluation/reward_mean" in line][-1]
        assert row.split()[2] == f"{last['evaluation/reward_mean']:.4g}"
    assert shared.startswith("all with train.optimizer.lr=0.001 ")
