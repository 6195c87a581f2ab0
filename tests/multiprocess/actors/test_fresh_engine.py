"""Megatron cut along every axis at once, into each engine: after syncs it answers as a fresh one of the export does."""

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rlframe.algorithms.grpo import Grpo
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.hub import resolve
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import Parts
from rlframe.run.load import load
from rlframe.types.rollout import GenerationRequest, members
from rlframe.utils.registry import find
from tests.multiprocess.program import LEARNING

CUT = "d1t2p2|ffn:d1t1e2p2"
WAYS = {"transformers": "shm", "vllm": "reload over shm"}
"""How weights get into each engine on the CPU."""


# `make test` has two other axes in test_weight_sync.py.
@pytest.mark.thorough
@pytest.mark.parametrize("name", WAYS)
def test_an_engine_after_syncs_answers_as_a_fresh_one_of_the_exported_checkpoint(name: str, tmp_path: Path) -> None:
    if name != "transformers" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    settings = LEARNING | {
        "output": tmp_path / "run",
        "train.parallel": CUT,
        "train.optimizer.lr": 1e-2,
        "rollout.num_engines": 1,
    }
    if name == "vllm":
        settings |= {"+rollout.enforce_eager": "true", "+rollout.max_model_len": 128}
    config = load("grpo_qwen3_moe", [f"rollout={name}", *(f"{key}={value}" for key, value in settings.items())])
    algorithm = Grpo(config.algorithm)
    sampling = config.rollout.sampling(greedy=True)
    with ExitStack() as stack:
        loop = online(Parts(config, algorithm.requirements, stack), algorithm)
        assert loop.weight_sync.choice.name == WAYS[name]
        prompts = loop.prompts.evaluation_prompts()
        first = members(loop.attempts.generate(prompts, group_size=1, step=0, sampling=sampling))
        for step in (1, 2):
            loop.step(step)
        synced = members(loop.attempts.generate(prompts, group_size=1, step=0, sampling=sampling))
        folder = tmp_path / "exported"
        folder.mkdir()
        write_checkpoint(folder, loop.policy.export(torch.float32))
        copy_sidecars(resolve(config.model), folder, dtype=torch.float32)
    assert [each.token_ids.tolist() for each in synced] != [each.token_ids.tolist() for each in first]
    assert {span.version for rollout in synced for span in rollout.spans} == {2}
    engine_class, _ = find("rlframe.rollout", name, key="rollout.name")
    fresh = engine_class(config.rollout, folder=folder, dtype=torch.float32, device="cpu")
    fresh.gate.begin(0)
    fresh.gate.commit(0)
    requests = [GenerationRequest(input=prompt.input, sampling=sampling, seed=0) for prompt in prompts]
    answers = fresh.generate(requests)
    fresh.close()
    for rollout, prompt, answer in zip(synced, prompts, answers, strict=True):
        assert rollout.token_ids[len(prompt.input) :].tolist() == answer.token_ids.tolist()
        assert rollout.rollout_logprobs[len(prompt.input) :] == pytest.approx(answer.logprobs, abs=1e-4)
