"""What is checked of devices, and of what their engines can do."""

from pathlib import Path

import pytest

from rlframe.run.check import topics_of
from rlframe.run.check.machines import devices
from rlframe.run.load import load
from tests.unit.run.check.test_check import faults, h200, model_in


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_in(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            ["rollout.temperature=0.005"],
            "rollout.temperature must be between 0.01 and 2 with rollout.name=vllm, got 0.005",
        ),
        (["rollout.temperature=2.5"], "rollout.temperature must be between 0.01 and 2"),
        (
            ["evaluation.sets.mine={path: arithmetic, temperature: 3}"],
            "evaluation.sets.mine.temperature must be between",
        ),
        (["mode=generate", "generation.temperature=3"], "generation.temperature must be between 0.01 and 2"),
        (["rollout.temperature=0.01"], ""),
        (["mode=generate", "generation.temperature=0"], ""),
        (["rollout=transformers", "rollout.temperature=2.5"], ""),
        (
            ["rollout=sglang", "rollout.temperature=1e-7"],
            "rollout.temperature must be at least 1e-06 with rollout.name=sglang",
        ),
    ],
)
def test_engines_sample_at_the_temperature_that_is_asked_for(overrides: list[str], rule: str) -> None:
    run = load("grpo_qwen3_moe", ["rollout=vllm", *overrides])
    found = list(map(str, devices.temperatures(run)))
    assert len(found) == bool(rule) and all(rule in fault for fault in found), found
    assert devices.temperatures in topics_of(run)


def test_a_critic_of_its_own_needs_devices(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_properties", h200)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    wide = ["algorithm=ppo", "cluster.device=cuda", "train.parallel=d2", "critic.train.parallel=d2"]
    with monkeypatch.context() as patch:
        patch.setattr("rlframe.run.check.machines.devices.missing", lambda package: package == "transformer_engine")
        (fault,) = faults(model, *wide)
        assert "cluster.device needs the package transformer-engine to train on GPUs" in fault
    monkeypatch.setattr("rlframe.run.check.machines.devices.missing", lambda package: False)
    assert faults(model, *wide) == []
    (fault,) = faults(model, *wide, "critic.colocate=false")
    assert "critic (2 ranks, critic.colocate=false)" in fault and "need 4 CUDA devices, this machine has 3" in fault
