"""Whole programs, as a user starts them."""

from pathlib import Path

import pytest

from tests.multiprocess.program import QUICK, Program, lines

pytestmark = pytest.mark.slow
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
        "logging.samples_per_step": 1,
    }
    folder = tmp_path / "run"
    with Program(folder, settings) as program:
        program.wait_for_step(1)
        assert program.finish() == 0, program.errors()
        # Ray's own processes, the actors and the reward workers end with the run.
        assert len(program.children) > 6
        assert program.survivors() == []
    steps = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    # A random model earns nothing; what counts is that math-verify judged every answer.
    assert all(line["reward/failed_fraction"] == 0.0 and "reward/math_mean" in line for line in steps)
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-4 for line in steps)
    sample = lines(folder / "samples.jsonl")[-1]
    assert "Solve the problem step by step" in sample["prompt"]
    assert sample["answer"].lstrip("-").replace(",", "").replace(".", "").isdigit()
    assert (folder / "model" / "model.safetensors").is_file()
