"""Weight sync between the real groups, over Ray, with faults put into one engine's process."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.algorithms.grpo import Grpo
from rlframe.config.load import load
from rlframe.loops.build import Builder
from rlframe.loops.online import OnlineLoop
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.hub import resolve
from rlframe.ops.packing import pack
from rlframe.rollout.group import RolloutWorker
from rlframe.rollout.transformers import TransformersConfig, TransformersEngine
from rlframe.types.batch import TrainBatch
from rlframe.types.rollout import GenerationRequest, SamplingParams
from rlframe.utils.errors import WeightSyncFailed
from tests.multiprocess.program import LEARNING

NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnlineLoop]:
    """The main job, calibrated at version 0: two ranks of TP2 and EP2, two engines."""
    settings = LEARNING | {
        "output": tmp_path_factory.mktemp("run"),
        "train.parallel": "d1t2|ffn:d1t1e2",
        "train.optimizer.lr": 1e-2,
    }
    config = load("grpo_qwen3_moe", [f"{key}={value}" for key, value in settings.items()])
    algorithm = Grpo(config.algorithm)
    with ExitStack() as stack:
        yield Builder(config, algorithm, stack).online(algorithm)


@pytest.fixture(scope="module")
def batch(loop: OnlineLoop) -> TrainBatch:
    """Something to train on, so that each version has other weights than the one before."""
    rollouts = loop.rollout.generate(loop.prompts.next(4), group_size=4, step=1)
    loop.judge.score(rollouts)
    packed = pack(rollouts, 4)
    return packed.with_advantages(loop.algorithm.advantages(packed))


@pytest.fixture
def version(loop: OnlineLoop, batch: TrainBatch) -> int:
    """The next version, trained but not published; the one before it is in place, whatever an earlier test broke."""
    loop.policy.train(batch)
    before = loop.weight_sync.policy_version + 1
    loop.weight_sync.publish(version=before)
    loop.policy.train(batch)
    return before + 1


def in_engine(loop: OnlineLoop, engine: int, fault: Any, *arguments: Any) -> None:
    """Run `fault(worker, *arguments)` inside that engine's process."""
    actor = loop.rollout.workers.actors[engine]
    loop.rollout.workers.wait([actor.__ray_call__.remote(fault, *arguments)], doing="sabotage")


def flip_a_bit_after_the_pull(worker: RolloutWorker, tensor: str) -> None:
    """The lowest bit of one element of `tensor`, once."""
    weights = worker.engine.weights
    pull = weights.pull

    def damaged() -> None:
        pull()
        view = weights.layout.boxes[tensor][0].view(weights._parameters)
        view[-1, -1:].view(torch.int32).bitwise_xor_(1)
        weights.pull = pull

    weights.pull = damaged


def skip_a_tensor(worker: RolloutWorker, tensor: str) -> None:
    """Its copies are left out, once."""
    weights = worker.engine.weights
    pull, transport = weights.pull, weights._transport
    target = weights.layout.boxes[tensor][0].view(weights._parameters).data_ptr()
    copies = transport._copies
    kept = [pair for pair in copies if pair[0].data_ptr() != target]
    assert 0 < len(copies) - len(kept) < len(copies)

    def partial() -> None:
        transport._copies = kept
        pull()
        transport._copies = copies
        weights.pull = pull

    weights.pull = partial


def pull_nothing(worker: RolloutWorker) -> None:
    """Once."""
    weights = worker.engine.weights
    pull = weights.pull

    def nothing() -> None:
        weights.pull = pull

    weights.pull = nothing


def test_a_flipped_bit_stops_the_run_and_names_tensor_engine_and_place(loop: OnlineLoop, version: int) -> None:
    in_engine(loop, 1, flip_a_bit_after_the_pull, EXPERT)
    with pytest.raises(WeightSyncFailed) as caught:
        loop.weight_sync.publish(version=version)
    text = str(caught.value)
    assert text.startswith(f"engine 1 does not hold version {version}: {EXPERT} differs; first at rows ")
    # Expert 5 of 8 lives on the second of two expert-parallel ranks.
    assert "on destination rank 1" in text and "source ranks 1)" in text
    assert loop.weight_sync.policy_version == version - 1
    prompts = loop.prompts.evaluation_prompts()
    with pytest.raises(WeightSyncFailed, match=f"version {version} that are not verified"):
        loop.rollout.generate(prompts, group_size=1, step=1)
    # The fault was in that one copy: the next version arrives, and the engines sample again.
    loop.weight_sync.publish(version=version + 1)
    rollouts = loop.rollout.generate(prompts, group_size=1, step=1)
    assert {segment.version for rollout in rollouts for segment in rollout.segments} == {version + 1}


def test_a_skipped_tensor_is_named(loop: OnlineLoop, version: int) -> None:
    in_engine(loop, 0, skip_a_tensor, NORM)
    with pytest.raises(WeightSyncFailed) as caught:
        loop.weight_sync.publish(version=version)
    expected = f"engine 0 still holds version {version - 1}: {NORM} of version {version} did not arrive"
    assert str(caught.value).startswith(expected)


def test_a_stale_engine_is_named_with_the_version_it_holds(loop: OnlineLoop, version: int) -> None:
    in_engine(loop, 1, pull_nothing)
    with pytest.raises(WeightSyncFailed, match=rf"^engine 1 still holds version {version - 1}: model\.\S+ of version"):
        loop.weight_sync.publish(version=version)


def test_an_old_version_is_refused(loop: OnlineLoop, version: int) -> None:
    with pytest.raises(WeightSyncFailed, match=f"version {version - 1} is not newer"):
        loop.weight_sync.publish(version=version - 1)


def test_engines_answer_as_one_that_loaded_the_exported_checkpoint(
    loop: OnlineLoop, version: int, tmp_path: Path
) -> None:
    loop.weight_sync.publish(version=version)
    write_checkpoint(tmp_path, loop.policy.export(torch.float32))
    copy_sidecars(resolve(loop.config.model), tmp_path, dtype=torch.float32)
    fresh = TransformersEngine(TransformersConfig(), folder=tmp_path, dtype=torch.float32, device="cpu")
    fresh.weights.begin(version)
    fresh.weights.commit(version)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = loop.prompts.evaluation_prompts()
    requests = [GenerationRequest(token_ids=prompt.token_ids, sampling=greedy, seed=0) for prompt in prompts]
    rollouts = loop.rollout.generate(prompts, group_size=1, step=1, sampling=greedy)
    for prompt, rollout, expected in zip(prompts, rollouts, fresh.generate(requests), strict=True):
        first = len(prompt.token_ids)
        assert rollout.token_ids[first:] == expected.token_ids
        assert rollout.rollout_logprobs[first:] == pytest.approx(expected.logprobs, abs=1e-6)
