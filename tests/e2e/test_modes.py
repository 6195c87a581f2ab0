"""mode=evaluate and mode=generate as whole programs, beside the run whose model they use."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.program import QUICK, Program, lines, run, titled
from tests.multiprocess.runs.test_reward_model import make_reward_model

SETTINGS = {key: value for key, value in QUICK.items() if key != "model.random_init"} | {
    "rollout.max_tokens": 8,
    "rollout.num_engines": 1,
    "reward.workers": 1,
    "evaluation.sets.sampled.path": "arithmetic#8",
    "evaluation.sets.sampled.samples_per_prompt": 4,
    "evaluation.sets.sampled.temperature": 1,
}
TRAINED = SETTINGS | {"steps": 1, "checkpoint.export_dtype": "float32", "train.optimizer.lr": 1e-2}


def results(folder: Path) -> dict[str, Any]:
    """Returns the metrics of each set."""
    written = json.loads((folder / "evaluate" / "results.json").read_text())
    return {name: each["metrics"] for name, each in written["sets"].items()}


def last_evaluation(folder: Path) -> dict[str, float]:
    """Returns the metrics of a run's last evaluation, without their prefix."""
    found = [line for line in lines(folder / "metrics.jsonl") if "evaluation/reward_mean" in line]
    return {key.removeprefix("evaluation/"): value for key, value in found[-1].items() if key != "step"}


def test_a_recipe_is_evaluated_by_engines_alone_that_are_proved(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "sums.jsonl"
    records = [{"prompt": f"{number}+{number}=", "answer": f"{2 * number}"} for number in range(80)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"data.path": file, "evaluation.sets.sampled.path": f"{file}#8"}
    with Program(folder, SETTINGS | data | {"mode": "evaluate"}) as program:
        assert program.finish() == 0, program.errors()
        said = program.errors()
    assert "all engines hold the model's files, tensor by tensor" in said
    assert not list((folder / "evaluate" / "logs").glob("policy-*")), "nothing trains"
    found = results(folder)
    assert 0 < found["held_out"]["reward_mean"] < 1 and found["held_out"]["lost_attempts"] == 0
    assert found["sampled"]["pass_at_1"] == pytest.approx(found["sampled"]["reward_mean"])
    assert found["sampled"]["pass_at_1"] <= found["sampled"]["pass_at_2"] <= found["sampled"]["pass_at_4"]
    responses = lines(folder / "evaluate" / "responses.jsonl")
    assert [len(line["responses"]) for line in responses] == [1] * 8 + [4] * 8


@pytest.mark.thorough
def test_the_model_of_a_run_is_evaluated_beside_it_as_the_run_has_evaluated_it(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", TRAINED)
    before = (folder / "run.json").read_bytes()
    run(folder, TRAINED | {"mode": "evaluate", "model.path": folder / "model"})
    assert (folder / "run.json").read_bytes() == before
    expected, found = last_evaluation(folder), results(folder)
    assert {key: found["held_out"][key] for key in expected if "/" not in key} == {
        key: value for key, value in expected.items() if "/" not in key
    }
    of_set = {key.removeprefix("sampled/"): value for key, value in expected.items() if key.startswith("sampled/")}
    assert of_set == {key: found["sampled"][key] for key in of_set} and "pass_at_4" in of_set


@pytest.mark.thorough
def test_a_generation_that_is_killed_goes_on_and_an_engine_may_die(tmp_path: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("evaluation.")} | {
        "mode": "generate",
        "data.path": "arithmetic#400",
        "rollout.max_tokens": 48,
        "rollout.num_engines": 2,
        "generation.samples_per_prompt": 2,
    }
    file = tmp_path / "run" / "generate" / "responses.jsonl"
    with Program(tmp_path / "run", settings) as program:
        program.wait_for(lambda: len(lines(file)) > 10, every_s=0.02)
        engine = next(each for each in program.started() if titled(each, "ray::RolloutWorker"))
        engine.send_signal(signal.SIGKILL)
        program.wait_for(lambda: "restarting engine" in program.errors() or len(lines(file)) == 400, every_s=0.02)
        program.kill()
    begun = len(lines(file))
    run(tmp_path / "run", settings)
    found = lines(file)
    assert begun <= len(found) == 400 == len({line["id"] for line in found})
    assert all(len(line["responses"]) == 2 and "reward" in line["responses"][0] for line in found)


@pytest.mark.thorough
@pytest.mark.parametrize("config", ["grpo_qwen3_moe", "sft_qwen3_moe_tiny"])
def test_a_run_of_no_steps_evaluates_and_exports(config: str, tmp_path: Path) -> None:
    online = SETTINGS if config == "grpo_qwen3_moe" else {"logging.progress": "false", "data.evaluation_count": 8}
    folder = run(tmp_path / "run", online | {"steps": 0}, config=config)
    measured = [line for line in lines(folder / "metrics.jsonl") if line["step"] == 0]
    assert any(key.startswith("evaluation/") for line in measured for key in line)
    assert (folder / "model" / "model.safetensors").is_file() and not list((folder / "checkpoints").glob("step-*"))
    run(folder, online | {"mode": "evaluate"}, config=config)
    expected = {key: value for line in measured for key, value in line.items() if key.startswith("evaluation/")}
    names = ["reward_mean"] if config == "grpo_qwen3_moe" else ["loss"]
    assert [results(folder)["held_out"][name] for name in names] == [expected[f"evaluation/{name}"] for name in names]


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["evaluate", "generate"])
def test_a_reward_model_and_a_judge_score_on_devices_of_their_own(mode: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("evaluation.")} | {
        "mode": mode,
        "data.path": "arithmetic#8",
        "reward.model.path": make_reward_model(tmp_path / "reward"),
        # With the policy's devices, in training.
        "reward.model.colocate": "true",
        "judge.path": "qwen3_moe_tiny",
        "judge.template": "'{response}+1='",
        "judge.reading.pattern": r"(\d)",
        "judge.without_score": "skip",
        "judge.engine.max_tokens": 6,
    }
    folder = run(tmp_path / "run", settings)
    found = lines(folder / mode / "responses.jsonl")
    parts = [set(response["reward_parts"]) for line in found for response in line["responses"]]
    assert len(parts) == 8 and all({"exact_match", "model"} <= each for each in parts)
    assert any("judge_model" in each for each in parts)
