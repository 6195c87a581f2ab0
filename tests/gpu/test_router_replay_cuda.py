"""Routed experts from engines on a GPU, replayed by Megatron there: the main job in bfloat16."""

from pathlib import Path

import pytest

from tests.gpu.test_weight_sync_cuda import checkpoint, running
from tests.multiprocess.program import lines

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_engines_experts_are_those_that_the_trainer_would_choose_but_for_near_ties(name: str, tmp_path: Path):
    """Rows of another token, or of a cached prompt's former weights, would differ in most places."""
    model, engine = checkpoint("moe", tmp_path / "initial"), {"name": name, "tp": 1}
    replay = {"train.moe.router_replay": "true"}
    with running(tmp_path / "run", model, "d1", engine, True, "cuda_ipc", **replay) as loop:
        for step in (1, 2):
            loop.step(step)
    steps = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["moe/routes_differ_fraction"] < 0.1 for line in steps)
    assert all(line["rollout/logprob_gap_mean_nats"] < 0.1 for line in steps)
