"""A reward model that is missing, without a head, too short, of another vocabulary or of no use is refused."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlframe.models.hub import EMBEDDED
from rlframe.run.check import check
from rlframe.run.check.roles import reward as check_reward
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

SOURCE = EMBEDDED / "qwen3_moe_tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model with a head of one output."""
    folder = tmp_path / "reward"
    shutil.copytree(SOURCE, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(1, 128)}, folder / "model.safetensors")
    return folder


def faults(*overrides: str) -> list[str]:
    """Those of the reward model alone."""
    return list(map(str, check_reward.model_faults(load("grpo_qwen3_moe", list(overrides)))))


def change(file: Path, **values: object) -> None:
    """Sets top-level keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_one_that_fits_has_no_fault(model: Path) -> None:
    assert faults() == []
    assert faults(f"reward.model.path={model}", "reward.model.parallel=t2") == []


def test_a_model_without_a_head_of_one_output_is_refused(model: Path) -> None:
    assert faults(f"reward.model.path={SOURCE}") == [
        f"reward.model.path must name a model with a head of one output (score.weight), got {SOURCE} with 0; "
        "algorithm=reward_model trains such a model"
    ]
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"score.weight": torch.zeros(3, 128)}, model / "model.safetensors")
    assert "got" in faults(f"reward.model.path={model}")[0] and " with 3;" in faults(f"reward.model.path={model}")[0]


def test_a_layout_must_divide_it(model: Path) -> None:
    found = faults(f"reward.model.path={model}", "reward.model.parallel=t3")
    assert found and all(fault.startswith("reward.model.parallel") for fault in found)
    assert all(fault.endswith(f"(of the reward model {model})") for fault in found)
    gathers = ["train.parallel=d1t2e2", "train.moe.dispatcher=allgather"]
    (fault,) = faults(f"reward.model.path={model}", "reward.model.parallel=d2e2", *gathers)
    assert "equally many tokens" in fault and "in reward.model.parallel=d2e2" in fault, fault
    with pytest.raises(ConfigError, match=r"reward\.model\.parallel is wrong: 't2x'"):
        load("grpo_qwen3_moe", [f"reward.model.path={model}", "reward.model.parallel=t2x"])


def test_attempts_of_several_turns_must_fit_its_positions_and_be_one_sequence(model: Path) -> None:
    settings = ["environment=calculator", f"reward.model.path={model}", "environment.max_tokens=200"]
    assert faults(*settings) == []
    assert faults(*settings, "rendering.history=fork") == [
        "reward.model.path cannot be used with rendering.history=fork: it scores one sequence, and an attempt may have "
        "several"
    ]
    change(model / "config.json", max_position_embeddings=199)
    (fault,) = faults(*settings)
    assert "at least 200 positions (environment.max_tokens)" in fault


def test_rollouts_must_fit_its_positions(model: Path) -> None:
    change(model / "config.json", max_position_embeddings=40)
    (fault,) = faults(f"reward.model.path={model}", "data.max_prompt_tokens=40", "rollout.max_tokens=6")
    assert "at least 46 positions (data.max_prompt_tokens + rollout.max_tokens)" in fault and fault.endswith(" with 40")


def test_it_must_read_the_policys_tokens(model: Path) -> None:
    tokenizer = model / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"]:
        token["content"] = token["content"].replace("user", "human")
    tokenizer.write_text(json.dumps(content))
    (fault,) = faults(f"reward.model.path={model}")
    assert fault.startswith("reward.model.path must name a model with the tokenizer of model.path=qwen3_moe_tiny")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.model.path=''"], "reward.model.path must be text of at least one character"),
        (["reward.model.path=x", "reward.model.weight=inf"], "reward.model.weight must be at most 1000000"),
        (["reward.model.path=x", "reward.parts.model.name=exact_match"], "parts must not be called 'model'"),
        (["reward.parts.response_tokens.name=length"], "parts must not be called 'response_tokens', which names"),
        (["+reward.parts.reward.name=length"], "parts must not be called 'reward', which names the sum of all parts"),
    ],
)
def test_a_value_out_of_range_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("grpo_qwen3_moe", overrides)


def test_a_run_is_checked_for_it(model: Path) -> None:
    with pytest.raises(ConfigError, match="reward.model.path has no effect with algorithm.name=sft"):
        check(load("sft_qwen3_moe_tiny", [f"+reward.model.path={model}"]))
    with pytest.raises(ConfigError, match="with a head of one output"):
        check(load("grpo_qwen3_moe", [f"reward.model.path={SOURCE}"]))
    with pytest.raises(ConfigError, match="or reward.model.path a reward model"):
        check(load("grpo_qwen3_moe", ["~reward"]))
    check(load("grpo_qwen3_moe", ["~reward", f"+reward.model.path={model}"]))


@pytest.mark.later
def test_a_function_is_tried_with_what_workers_have(tmp_path: Path) -> None:
    (tmp_path / "only_there.py").write_text("one = 1.0\n")
    source = "import os\nfrom only_there import one\nos.environ['SERVICE']\n\ndef score(response, answer): return one\n"
    (tmp_path / "mine.py").write_text(source)
    judge = [f"reward.parts.judge.options.endpoint.{word}" for word in ("base_url=http://a/v1", "model=m")]
    judge += ["+reward.parts.judge.name=judge", "reward.parts.judge.options.endpoint.api_key_variable=SERVICE"]
    words = [f"reward.parts.mine.name={tmp_path}/mine.py:score", *judge]
    environment = [f"cluster.runtime_env.working_dir={tmp_path}", "cluster.runtime_env.env_vars.SERVICE=x"]

    def found(*words: str) -> list[str]:
        return list(map(str, check_reward.faults(load("grpo_qwen3_moe", list(words)))))

    assert found(*words, *environment) == []
    assert len([fault for fault in found(*words, environment[0]) if "SERVICE" in fault]) == 2
    assert [fault.split()[-1] for fault in found(*words, environment[1])] == ["'only_there'"]
    assert found(*words, environment[1], "cluster.runtime_env.pip=[there]") == [], "only nodes have what pip brings"
    assert "SERVICE" not in os.environ and str(tmp_path) not in sys.path
