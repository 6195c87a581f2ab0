"""Which runs can replay routed experts."""

import json
from pathlib import Path

import pytest

from rlframe.models.config import ModelConfig
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.run.check import check
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError
from tests.unit.run.check.test_check import QWEN3_MOE, copy_tokenizer

REPLAY = "train.moe.router_replay=true"


def faults(folder: Path, *overrides: str, config: str = "grpo_qwen3_moe", **changes: object) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | changes))
    copy_tokenizer(folder)
    small = ["data.max_prompt_tokens=64", "rollout.max_tokens=64"] if config.startswith("grpo") else []
    try:
        check(load(config, [f"model.path={folder}", "model.random_init=true", REPLAY, *small, *overrides]))
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


@pytest.mark.parametrize("overrides", [[], ["algorithm=ppo"], ["rollout.stop=[x]"]], ids=" ".join)
def test_a_model_with_experts_and_an_engine_that_tells_have_no_fault(tmp_path: Path, overrides: list[str]) -> None:
    assert faults(tmp_path, *overrides) == []


def test_an_engine_that_does_not_tell_with_stop_strings_says_so_to_agents() -> None:
    parts = {"model": ModelConfig(path="m"), "dtype": "float32", "device": "cpu", "seed": 0}
    assert RolloutSetup(rollout=SglangConfig(), with_routes=True, **parts).stop_fault.startswith(f"{REPLAY} needs the")
    assert RolloutSetup(rollout=SglangConfig(), **parts).stop_fault == ""
    assert RolloutSetup(rollout=VllmConfig(), with_routes=True, **parts).stop_fault == ""


def test_an_engine_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    assert faults(tmp_path, "rollout=vllm", "cluster.device=cpu", "rollout.stop=[x]") == []
    found = faults(tmp_path, "rollout=sglang", "cluster.device=cpu", "rollout.stop=[x]")
    found = [fault for fault in found if fault.startswith("train.moe.router_replay")]
    assert found == [
        "train.moe.router_replay=true cannot work: rollout.stop must be empty if rollout.name=sglang is to return "
        "routed experts: it returns them only for responses that end by a stop token or by their length, got ['x']",
    ]


def test_a_dense_model_and_a_run_that_samples_nothing_have_no_use_for_it(tmp_path: Path) -> None:
    dense = {name: value for name, value in QWEN3_MOE.items() if "expert" not in name and name != "norm_topk_prob"}
    (tmp_path / "config.json").write_text(json.dumps(dense | {"model_type": "qwen3"}))
    with pytest.raises(
        ConfigError, match=r"train\.moe\.router_replay has no effect on qwen3, which is dense, got true"
    ):
        check(load("grpo_qwen3_moe", [f"model.path={tmp_path}", REPLAY, "train.parallel=d1"]))
    (fault,) = faults(tmp_path, config="sft_qwen3_moe_tiny")
    assert fault == (
        "train.moe.router_replay has no effect with algorithm.name=sft, with which the policy samples nothing, got "
        "true; remove it"
    )
