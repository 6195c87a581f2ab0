"""A run that is killed and started again is, bit for bit, the run that was never killed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.loops.saving.checkpoints import read_state
from tests.multiprocess.program import ONLINE, QUICK, Program, assert_equal_models, lines, metrics, run, samples

# bfloat16 weights hide the float32 main weights, which must come back too.
OFFLINE = {key: value for key, value in QUICK.items() if not key.startswith(("rollout", "data.max_prompt"))} | {
    "steps": 6,
    "checkpoint.every_steps": 2,
    "checkpoint.keep_best": 1,
    "checkpoint.best_metric": "train/loss",
    "checkpoint.best_mode": "min",
    "checkpoint.export_every_steps": 3,
    "train.dtype": "bfloat16",
    "train.optimizer.schedule": "cosine",
    "data.path": "arithmetic#20",
    # Beside the run's folder, as the program works there.
    "data.cache_folder": "cache",
}
# 24 items of windows of 10: it is killed in the second, and goes on from a checkpoint in it.
STREAMED = {key: value for key, value in OFFLINE.items() if key != "data.cache_folder"} | {
    "data.path": "arithmetic",
    "data.evaluation_path": "arithmetic",
    "data.streaming": "true",
    "data.shuffle_buffer": 10,
}


IN_BACKGROUND = ONLINE | {"checkpoint.asynchronous": "true"}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed in the middle of its checkpoint of step 4, which is written in the background."""
    folder = tmp_path_factory.mktemp("resumed") / "run"
    kill_in_a_checkpoint(folder)
    return run(folder, IN_BACKGROUND)


def kill_in_a_checkpoint(folder: Path) -> None:
    """Starts the run, and kills it while it writes the checkpoint of step 4."""
    with Program(folder, IN_BACKGROUND, held=["checkpoint 4"]) as program:
        program.wait_for_half_a_checkpoint(4)
        program.kill()
        assert program.survivors() == []
    assert complete(folder) == ["step-00000002"]


def complete(folder: Path) -> list[str]:
    """Names of the checkpoints that count."""
    return sorted(marker.parent.name for marker in (folder / "checkpoints").glob("*/COMPLETE"))


def test_the_run_has_something_to_lose(whole: Path) -> None:
    # Were gradients, KL or the schedule idle, equal numbers would prove nothing.
    steps = [line for line in metrics(whole) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["train/grad_norm"] > 1e-3 for line in steps)
    assert all(line["train/kl_nats"] > 0 for line in steps)
    assert len({line["train/lr"] for line in steps}) == 6
    assert len({line["train/kl_coefficient"] for line in steps}) == 6
    kept = [line["memory/policy_offloaded_bytes"] for line in lines(whole / "metrics.jsonl") if "train/loss" in line]
    assert all(each > 0 for each in kept)


def test_a_killed_run_goes_on_bit_by_bit(whole: Path, resumed: Path) -> None:
    assert metrics(resumed) == metrics(whole)
    assert lines(resumed / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(resumed, whole)
    assert complete(resumed) == complete(whole) == ["step-00000004", "step-00000006"]


@pytest.mark.thorough
def test_processes_forked_for_these_tests_compute_what_fresh_ones_do(whole: Path, tmp_path: Path) -> None:
    fresh = run(tmp_path / "run", ONLINE, fresh=True)
    assert metrics(fresh) == metrics(whole)
    assert lines(fresh / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(fresh, whole)


@pytest.mark.thorough
def test_a_run_that_is_killed_twice_goes_on_bit_by_bit(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Program(folder, ONLINE, held=["step 3"]) as program:
        program.wait_for_step(3)
        program.kill()
        assert program.survivors() == []
    assert complete(folder) == ["step-00000002"]
    kill_in_a_checkpoint(folder)
    run(folder, IN_BACKGROUND)
    assert metrics(folder) == metrics(whole)
    assert lines(folder / "samples.jsonl") == lines(whole / "samples.jsonl")
    assert_equal_models(folder, whole)


def test_every_prompt_is_consumed_exactly_once_an_epoch(resumed: Path) -> None:
    dealt = [sample["id"] for step in range(1, 7) for sample in samples(resumed, step, count=16)]
    # 4 prompts of 4 rollouts for 6 steps: the whole epoch of 20 prompts, then 4 of the next.
    first_epoch, second_epoch = Counter(dealt[:80]), Counter(dealt[80:])
    assert len(first_epoch) == 20 and set(first_epoch.values()) == {4}
    assert len(second_epoch) == 4 and set(second_epoch.values()) == {4}


@pytest.mark.thorough
def test_a_run_begins_with_the_weights_of_another_runs_checkpoint(whole: Path, tmp_path: Path) -> None:
    settings = ONLINE | {
        "seed": 99,
        "steps": 1,
        "train.num_minibatches": 1,
        "train.offload_optimizer": False,
        "checkpoint.start_from": whole / "checkpoints" / "step-00000006" / "training",
        "checkpoint.export": "false",
    }
    begun = run(tmp_path / "run", settings)

    def answers(folder: Path, step: int) -> list[dict[str, Any]]:
        held_out = [line for line in lines(folder / "samples.jsonl") if line["step"] == step][-8:]
        return [{key: value for key, value in line.items() if key not in ("step", "versions")} for line in held_out]

    # Its own weights, of another seed, answer otherwise; so did those that the other run began with.
    assert answers(begun, 0) == answers(whole, 6) != answers(whole, 0)
    (trained,) = (line for line in metrics(begun) if "train/loss" in line)
    # The reference has the same weights, so nothing is between it and the policy that samples the first batch.
    assert trained["train/kl_nats"] == pytest.approx(0, abs=1e-6) and trained["train/grad_norm"] > 1e-3


@pytest.mark.thorough
def test_adapters_resume_on_the_base_that_the_run_began_with(tmp_path: Path) -> None:
    settings = OFFLINE | {"checkpoint.export_every_steps": 0}
    base = run(tmp_path / "base", settings | {"seed": 99, "steps": 2}, config="sft_qwen3_moe_tiny")
    settings |= {"train.lora.rank": 4, "checkpoint.start_from": base / "checkpoints" / "step-00000002" / "training"}
    whole = run(tmp_path / "whole", settings, config="sft_qwen3_moe_tiny")
    with Program(tmp_path / "resumed", settings, config="sft_qwen3_moe_tiny", held=["step 5"]) as program:
        program.wait_for_step(5)
        program.kill()
    resumed = run(tmp_path / "resumed", settings, config="sft_qwen3_moe_tiny")
    assert metrics(resumed) == metrics(whole)
    assert_equal_models(resumed, whole)
    adapted, before = (load_file(folder / "model/model.safetensors") for folder in (whole, base))
    # No adapter changes it, and it was trained before.
    assert torch.equal(adapted["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [OFFLINE, STREAMED], ids=["in memory", "streamed"])
def test_supervised_training_resumes_bit_by_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = run(tmp_path / "whole", settings, config="sft_qwen3_moe_tiny")
    with Program(tmp_path / "resumed", settings, config="sft_qwen3_moe_tiny", held=["step 5"]) as program:
        program.wait_for_step(5)
        program.kill()
    resumed = run(tmp_path / "resumed", settings, config="sft_qwen3_moe_tiny")
    steps = [line for line in metrics(whole) if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in metrics(whole) if "evaluation/loss" in line] == [0, 6]
    assert metrics(resumed) == metrics(whole)
    assert_equal_models(resumed, whole)
    losses = {line["step"]: line["train/loss"] for line in steps}
    for name in complete(whole):
        state = read_state(whole / "checkpoints" / name)
        assert state.score == losses[state.step]
    exports = sorted((whole / "exports").iterdir())
    assert [path.name for path in exports] == ["step-00000003", "step-00000006"]
    files = {path.name for path in (whole / "model").iterdir()}
    assert all({path.name for path in export.iterdir()} == files for export in exports)
    assert {"generation_config.json", "tokenizer.json", "config.json"} < files
    third, last = (load_file(export / "model.safetensors") for export in exports)
    assert any(not torch.equal(third[name], last[name]) for name in last)
    assert all(torch.equal(last[name], value) for name, value in load_file(whole / "model/model.safetensors").items())
