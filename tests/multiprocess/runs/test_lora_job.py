"""The main job with `train.lora`: adapters learn, engines sample from the merged weights, and both exports agree."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlframe.models.random_init import random_tensor
from tests.multiprocess.program import LEARNING, Program, lines


@pytest.mark.thorough
def test_a_run_trains_adapters_syncs_merged_weights_and_exports_both(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = LEARNING | {
        "steps": 2,
        "seed": 7,
        "train.lora.rank": 4,
        "train.optimizer.lr": 1e-2,
        "algorithm.kl_coefficient": 0.05,
        "checkpoint.every_steps": 0,
        "checkpoint.export_dtype": "float32",
        "checkpoint.export_every_steps": 1,
        "rollout.num_engines": 1,
    }
    with Program(folder, settings) as program:
        assert program.finish() == 0, program.errors()
    steps = [line for line in lines(folder / "metrics.jsonl") if "train/loss" in line]
    assert len(steps) == 2 and all(line["train/grad_norm"] > 0 for line in steps)
    # The second step's answers were sampled from merged weights; the trainer computes base and adapter apart.
    assert all(line["rollout/logprob_gap_max_nats"] < 1e-4 for line in steps)

    exports = folder / "exports"
    assert sorted(path.name for path in exports.iterdir()) == [
        "step-00000001", "step-00000001-adapter", "step-00000002", "step-00000002-adapter"
    ]  # fmt: skip
    first = assert_merged(exports / "step-00000001", exports / "step-00000001-adapter")
    second = assert_merged(exports / "step-00000002", exports / "step-00000002-adapter")
    last = assert_merged(folder / "model", folder / "adapter")
    assert any(not torch.equal(first[name], last[name]) for name in last)
    assert second.keys() == last.keys() and all(torch.equal(second[name], last[name]) for name in last)


def assert_merged(model: Path, adapter_folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter that has learned, after comparing the model with W + alpha / r * B A."""
    adapter = load_file(adapter_folder / "adapter_model.safetensors")
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32.0)
    learned = 0
    for name, value in load_file(model / "model.safetensors").items():
        expected = random_tensor(name, tuple(value.shape), zero_centered_norms=False, seed=7)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_B.weight" in adapter:
            expected += 32.0 / 4 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            learned += bool(adapter[f"{module}.lora_B.weight"].any())
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert learned > 10
    return adapter
