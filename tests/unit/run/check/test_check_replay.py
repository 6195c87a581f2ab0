"""Which recordings a run can replay."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlframe.attempts.account.recording import RECORDING, ROLLOUTS, begin_recording, step_folder
from rlframe.attempts.account.stored import write_groups
from rlframe.config.load import composed
from rlframe.run.check import check, checked
from rlframe.run.load import load
from rlframe.run.recording import recording_of
from rlframe.utils.errors import ConfigError
from tests.unit.run.check.test_check import QWEN3_MOE, copy_tokenizer

SMALL = ["model.random_init=true", "data.max_prompt_tokens=64", "rollout.max_tokens=64", "rollout.stop=[x]", "steps=3"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    copy_tokenizer(folder)
    return folder


@pytest.fixture
def recorded(tmp_path: Path, model: Path) -> Path:
    """The recording of a run of three steps."""
    output = tmp_path / "recorded"
    config = load("grpo_qwen3_moe", [f"model.path={model}", *SMALL])
    begin_recording(output, recording_of(config, run="abc", tokenizer=AutoTokenizer.from_pretrained(model)))
    for step in (1, 2, 3):
        write_groups(step_folder(output, step), [])
    return output


def faults(model: Path, output: Path, *overrides: str) -> list[str]:
    try:
        check(load("grpo_qwen3_moe", [f"model.path={model}", *SMALL, f"rollout.replay={output}", *overrides]))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


def test_the_run_that_recorded_can_be_replayed(model: Path, recorded: Path) -> None:
    assert faults(model, recorded) == []
    assert faults(model, recorded, "steps=2", "train.optimizer.lr=1e-3", "algorithm=rloo") == []


def test_neither_engine_nor_data_nor_rewards_need_be_here(model: Path, recorded: Path) -> None:
    overrides = [
        "rollout=sglang",
        "rollout.tp=2",
        "data.path=/not/here.jsonl",
        "reward.parts.exact_match.name=/not/here.py:f",
    ]
    assert faults(model, recorded, *overrides, "weight_sync.transport=cuda_ipc", "cluster.device=cpu") == []


def test_a_wrong_setting_of_engines_does_not_ask_for_the_data_and_rewards(model: Path, recorded: Path) -> None:
    elsewhere = ["data.path=/not/here.jsonl", "reward.parts.exact_match.name=/not/here.py:f"]
    wrong = ["rollout.temperature=-1", "train.num_minibatches=3"]
    overrides = [f"model.path={model}", *SMALL, f"rollout.replay={recorded}", *elsewhere, *wrong]
    with pytest.raises(ConfigError) as error:
        checked(composed("grpo_qwen3_moe", overrides))
    assert [str(fault.key) for fault in error.value.faults] == ["rollout.temperature", "prompts_per_step"]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("prompts_per_step=8", "prompts_per_step must be 64, with which rollout.replay was recorded, got 8"),
        ("rollout.temperature=0.5", "rollout.temperature must be 1.0, with which rollout.replay was recorded, got 0.5"),
        ("rollout.stop=[]", 'rollout.stop must be ["x"], with which rollout.replay was recorded, got []'),
        (
            "train.moe.router_replay=true",
            "train.moe.router_replay must be false, with which rollout.replay was recorded, got true",
        ),
    ],
)
def test_other_settings_of_sampling_are_refused(model: Path, recorded: Path, override: str, sentence: str) -> None:
    assert faults(model, recorded, override) == [sentence]


def test_another_tokenizer_is_refused(model: Path, recorded: Path) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 299, "content": "<|new|>"})
    file.write_text(json.dumps(content))
    (fault,) = faults(model, recorded)
    assert fault.startswith("model.path must have the tokenizer with which rollout.replay was recorded, whose finger")


@pytest.mark.parametrize(
    ("steps", "removed", "parts"),
    [
        (3, [2], ["must hold all of steps=3", "without step 2; record it again"]),
        (9, [], ["without step 4, 5, 6, 7, 8 and 1 more; set steps=3, and train.optimizer.decay_steps"]),
        (3, [1, 2, 3], ["without step 1, 2, 3; record it again"]),
    ],
)
def test_missing_steps_are_refused(
    model: Path, recorded: Path, steps: int, removed: list[int], parts: list[str]
) -> None:
    for step in removed:
        for file in step_folder(recorded, step).iterdir():
            file.unlink()
    (fault,) = faults(model, recorded, f"steps={steps}")
    assert fault.startswith("rollout.replay ") and all(part in fault for part in parts), fault


def test_folders_without_a_recording_are_refused(model: Path, recorded: Path, tmp_path: Path) -> None:
    (fault,) = faults(model, tmp_path / "nothing")
    assert fault.startswith("rollout.replay must be the folder of a run with rollout.record=true, got ")
    (fault,) = faults(model, recorded, f"output={recorded}")
    assert fault.startswith("rollout.replay must be the folder of another run, got ")
    file = recorded / ROLLOUTS / RECORDING
    file.write_bytes(file.read_bytes().replace(b"64", b"65"))
    (fault,) = faults(model, recorded)
    assert fault.startswith("rollout.replay: ") and "recording.json is damaged" in fault


def test_a_checkpoint_cannot_be_chosen_by_what_a_replay_does_not_measure(model: Path, recorded: Path) -> None:
    overrides = ["checkpoint.keep_best=1", "checkpoint.best_metric=evaluation/reward_mean"]
    assert faults(model, recorded, *overrides) == [
        "checkpoint.best_metric is not measured in a replay, which evaluates nothing, got evaluation/reward_mean"
    ]


def test_a_replay_has_no_lag(model: Path, recorded: Path) -> None:
    lag = ["cluster.colocate=true", "loop.max_policy_lag=2", "loop.pipeline_depth=2", "rollout.cache_after_sync=keep"]
    why = f"has no effect with rollout.replay={recorded}, which samples nothing, got 2; remove it"
    assert faults(model, recorded, *lag) == [f"loop.max_policy_lag {why}", f"loop.pipeline_depth {why}"]
    assert faults(model, recorded, "rollout.cache_after_sync=keep") == []


def test_a_replay_is_not_recorded_again(model: Path, recorded: Path) -> None:
    (fault,) = faults(model, recorded, "rollout.record=true")
    assert fault.startswith("rollout.record has no effect with replay=")
