"""Which of vLLM's model runners an engine gets: V2 for mixtures that were measured, where vLLM 0.26 takes V1."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from rlframe.rollout.vllm.decode import runner
from rlframe.rollout.vllm.decode.ahead import ENTRIES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
MEASURED = "Qwen3MoeForCausalLM"


def config(*, asked: Any = ENTRIES, model: str = MEASURED, kind: str = "generate", **changes: Any) -> Any:
    """What vLLM asks."""
    devices = changes.pop("devices", 1)
    return SimpleNamespace(
        additional_config=asked,
        model_config=SimpleNamespace(runner_type=kind, architectures=[model]),
        parallel_config=SimpleNamespace(world_size=devices),
        lora_config=changes.pop("lora", None),
    )


@pytest.fixture
def is_default(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The question of vLLM 0.26, which has only some mixtures on its list."""
    import vllm
    from vllm.config import VllmConfig

    def listed(self: Any) -> bool:
        return self.model_config.architectures == ["Qwen2MoeForCausalLM"]

    monkeypatch.setattr(vllm, "__version__", "0.26.0")
    monkeypatch.setattr(VllmConfig, "_is_default_v2_model_runner_model", listed, raising=False)
    runner.prefer_second()
    runner.prefer_second()
    return vars(VllmConfig)["_is_default_v2_model_runner_model"]


def test_a_mixture_that_was_measured_has_the_second_runner(is_default: Any) -> None:
    assert is_default(config())
    assert is_default(config(model="Qwen2MoeForCausalLM", asked={}, devices=4))


@pytest.mark.parametrize(
    "changes",
    [{"asked": {}}, {"asked": None}, {"model": "Other"}, {"devices": 2}, {"lora": object()}, {"kind": "pooling"}],
)
def test_others_have_what_vllm_chooses(is_default: Any, changes: dict[str, Any]) -> None:
    assert not is_default(config(**changes))


def test_releases_without_the_question_decide_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig

    monkeypatch.delattr(VllmConfig, "_is_default_v2_model_runner_model", raising=False)
    runner.prefer_second()
    assert "_is_default_v2_model_runner_model" not in vars(VllmConfig)


def test_experts_are_recorded_in_both_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    assert not runner.is_measured([MEASURED], world_size=1), "of another release"
    monkeypatch.setattr(vllm, "__version__", "0.26.1")
    assert runner.is_measured([MEASURED], world_size=1)
    assert not runner.is_measured([MEASURED], world_size=2) and not runner.is_measured(["Other"], world_size=1)
