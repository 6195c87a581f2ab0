"""vLLM on a GPU drafts with the head for multi-token prediction: every sync brings it, also after a sleep that has
dropped it, drafts follow the policy, and responses are the policy's."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.decode import runner
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.types.input import ModelInput
from rlframe.types.rollout import Completion, GenerationRequest, SamplingParams
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.layout.memory import identity_layout
from rlframe.weight_sync.proof.digest import DigestPlan, common_units
from tests.contracts.engines.test_speculative import require_frequencies, second_token
from tests.contracts.engines.trainer import OneEngine, Trainer, synced
from tests.gpu.test_engine_contract_cuda import MEAN_NATS, gap_nats
from tests.gpu.test_weight_sync_cuda import engine_digests, running
from tests.mtp_models import followed_by_the_next, make_served
from tests.multiprocess.program import lines
from tests.rollout_models import make_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
NAME, HEAD = "glm4_moe", "model.layers.2."
OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
EXACT = "e_score_correction_bias"
"""In float32 in every checkpoint."""
LOGIT = 14.0
"""Of the next token: all but sure at temperature 1."""
NUM_SAMPLES = 3000
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A width that the experts' kernels can cut.
    made = make_served(NAME, tmp_path_factory.mktemp("model"), moe_intermediate_size=64)
    weights = load_file(made / "model.safetensors")
    save_file(
        # Copies: the loaded ones are views of the file that is written.
        {name: value.clone() if name.endswith(EXACT) else value.bfloat16() for name, value in weights.items()},
        made / "model.safetensors",
        metadata={"format": "pt"},
    )
    return made


def rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as a checkpoint has them. vLLM holds a router in float32, and would see digits of others."""
    return {name: value if name.endswith(EXACT) else value.bfloat16().float() for name, value in weights.items()}


@pytest.fixture(scope="module", params=["first", "second"])
def case(
    request: pytest.FixtureRequest, folder: Path
) -> Iterator[tuple[VllmEngine, Trainer, OneEngine, Any, dict[str, Tensor]]]:
    """An engine with CUDA graphs in one of vLLM's model runners, a trainer on the same device, and the weights that
    both have at first."""
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    before = runner.CHOSEN_RUNNER
    if request.param == "second":
        runner.CHOSEN_RUNNER = os.environ[runner.RUNNER] = "1"
    config = VllmConfig(
        speculative=SpeculativeConfig(method=SpeculativeMethod.MTP, num_tokens=2),
        kv_cache_gb=1.0,
        max_num_seqs=64,
        compile=False,
        sleep_level=2,
    )
    engine = VllmEngine(config, folder=folder, dtype=torch.bfloat16, device="cuda", with_mtp=True)
    try:
        trainer, destination, sync = synced(engine, {name: value.cuda() for name, value in weights.items()})
        yield engine, trainer, destination, sync, weights
        sync.close()
    finally:
        engine.close()
        runner.CHOSEN_RUNNER = before
        os.environ.pop(runner.RUNNER, None)


def published(case: Any, weights: dict[str, Tensor]) -> None:
    """Brings the weights into the engine as the next version."""
    _, trainer, _, sync, _ = case
    trainer.train({name: value.cuda() for name, value in weights.items()})
    sync.publish(version=sync.policy_version + 1)


def accepted(engine: VllmEngine, requests: list[GenerationRequest]) -> tuple[list[Completion], float]:
    """The responses, and the fraction of drafted tokens that were kept."""
    before = engine.drafts()
    completions = engine.generate(requests)
    made = engine.drafts() - before
    assert made.num_tokens
    return completions, made.num_accepted / made.num_tokens


def without_head(folder: Path, weights: dict[str, Tensor], scratch: Path) -> Path:
    """A folder of the model that transformers can load."""
    shutil.copy(folder / "config.json", scratch)
    kept = {name: value for name, value in weights.items() if not name.startswith(HEAD)}
    save_file(kept, scratch / "model.safetensors", metadata={"format": "pt"})
    return scratch


def test_drafts_follow_the_policy_also_after_a_sleep_that_has_dropped_the_head(
    case: Any, folder: Path, tmp_path: Path
) -> None:
    engine, trainer, _, sync, weights = case
    assert sync.choice.name == "cuda_ipc"
    requests = make_requests(8, group_size=2, sampling=SamplingParams(temperature=0.8, max_tokens=60, min_tokens=60))
    new = rounded(followed_by_the_next(weights, NAME, logit=LOGIT))
    fractions = []
    for version in (new | {name: value for name, value in weights.items() if name.startswith(HEAD)}, new):
        published(case, version)
        completions, fraction = accepted(engine, requests)
        assert gap_nats(without_head(folder, version, tmp_path), requests, completions) < MEAN_NATS
        fractions.append(fraction)
    engine.sleep()
    assert engine.weights_lost
    engine.wake_weights()
    published(case, new)
    engine.wake()
    sync.audit()
    completions, fraction = accepted(engine, requests)
    assert gap_nats(without_head(folder, new, tmp_path), requests, completions) < MEAN_NATS
    # With a head left behind, with the policy's, and after the sleep.
    assert fractions[0] < 0.1, fractions
    assert min(fractions[1], fraction) > 0.7, (fractions, fraction)
    held = {f"drafter.{HEAD}{name}.weight": trainer.parameters[f"{HEAD}{name}.weight"].bfloat16().cpu() for name in OWN}
    layout = identity_layout(held)
    expected = dict(zip(held, DigestPlan(layout, held, units=common_units([layout])).shares().tolist(), strict=True))
    (found,) = OneEngine(engine).call(DestinationRank.snapshot)
    assert {name: found[name] for name in held} == expected


def test_tokens_behind_a_draft_have_the_models_distribution(case: Any, folder: Path, tmp_path: Path) -> None:
    """As in tests/contracts/engines/test_speculative.py, with drafts of which about half are kept."""
    engine, *_, weights = case
    new = rounded(followed_by_the_next(weights, NAME, logit=4.0))
    published(case, new)
    prompt, sampling = (5, 9, 14, 5, 9), SamplingParams(temperature=1.0, max_tokens=4, min_tokens=4)
    requests = [
        GenerationRequest(input=ModelInput(np.array(prompt)), sampling=sampling, seed=seed)
        for seed in range(NUM_SAMPLES)
    ]
    completions, fraction = accepted(engine, requests)
    assert 0.2 < fraction < 0.9
    policy = AutoModelForCausalLM.from_pretrained(without_head(folder, new, tmp_path), dtype=torch.float32)
    seconds = torch.tensor([int(each.token_ids[1]) for each in completions])
    require_frequencies(seconds, second_token(policy, prompt, temperature=1.0, stops=engine.stop_tokens))


def test_a_head_that_is_trained_is_accepted_more_often_and_equals_the_exported_one(
    folder: Path, tmp_path: Path
) -> None:
    """The main job on one GPU, where engine and policy take turns."""
    more = {
        "train.mtp.mode": "train",
        "train.mtp.loss_scaling_factor": "1.0",
        # Which random answers do not earn: the policy stays, and the head catches up.
        "reward.parts.exact_match.name": "exact_match",
        "train.optimizer.lr": "5e-3",
        "train.optimizer.warmup_steps": "1",
        "+rollout.speculative.method": "mtp",
        "+rollout.speculative.num_tokens": "1",
        "rollout.temperature": "0.5",
        "rollout.max_tokens": "32",
        "prompts_per_step": "16",
    }
    exported = tmp_path / "exported"
    exported.mkdir()
    with running(tmp_path / "run", folder, "d1", {"tp": 1}, True, "auto", **more) as loop:
        for step in range(1, STEPS + 1):
            loop.step(step)
        loop.weight_sync.restore()
        held = engine_digests(loop)
        write_checkpoint(exported, loop.policy.export(torch.float32))
        copy_sidecars(folder, exported, dtype=torch.float32)
    logged = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]
    fractions = [line["rollout/draft_accepted_fraction"] for line in logged]
    assert len(fractions) == STEPS
    assert fractions[0] < 0.06 and max(fractions[-2:]) > max(2 * fractions[0], 0.1), fractions
    with running(tmp_path / "fresh", exported, "d1", {"tp": 1}, True, "auto", **more) as loop:
        fresh = engine_digests(loop)
    assert any(name.startswith("drafter.") for name in fresh[0])
    assert held == fresh
