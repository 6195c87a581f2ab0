"""Weight sync between the real groups, over Ray, with faults put into one engine's process."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlframe.algorithms.grpo import Grpo
from rlframe.loops.online import OnlineLoop
from rlframe.models.checkpoint import copy_sidecars, write_checkpoint
from rlframe.models.hub import resolve
from rlframe.ops.packing import pack
from rlframe.rollout.fleet.worker import RolloutWorker
from rlframe.rollout.transformers.engine import TransformersConfig, TransformersEngine
from rlframe.run.compose.online import online
from rlframe.run.compose.parts import Parts
from rlframe.run.load import load
from rlframe.types.batch import TrainBatch
from rlframe.types.rollout import GenerationRequest, SamplingParams, members
from rlframe.utils.errors import WeightSyncFailed
from tests.multiprocess.program import LEARNING
from tests.until import PATIENCE_S, until

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
        yield online(Parts(config, algorithm.requirements, stack), algorithm)


@pytest.fixture(scope="module")
def batch(loop: OnlineLoop) -> TrainBatch:
    """Something to train on, so that each version has other weights than the one before."""
    groups = loop.attempts.generate(loop.prompts.next(4), group_size=4, step=1)
    packed = pack(groups)
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
    transport, pull = weights._transport, weights._transport.pull

    def damaged(part: int = 0) -> None:
        pull(part)
        view = weights.layout.boxes[tensor][0].view(weights._parameters)
        view[-1, -1:].view(torch.int32).bitwise_xor_(1)
        transport.pull = pull

    transport.pull = damaged


def skip_a_tensor(worker: RolloutWorker, tensor: str) -> None:
    """Its copies are left out, once."""
    weights = worker.engine.weights
    transport = weights._transport
    pull = transport.pull
    target = weights.layout.boxes[tensor][0].view(weights._parameters).data_ptr()
    (copies,) = transport._parts
    kept = [pair for pair in copies if pair[0].data_ptr() != target]
    assert 0 < len(copies) - len(kept) < len(copies)

    def partial(part: int = 0) -> None:
        transport._parts = [kept]
        pull(part)
        transport._parts, transport.pull = [copies], pull

    transport.pull = partial


def pull_nothing(worker: RolloutWorker) -> None:
    """Once."""
    transport = worker.engine.weights._transport
    pull = transport.pull

    def nothing(part: int = 0) -> None:
        transport.pull = pull

    transport.pull = nothing


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
        members(loop.attempts.generate(prompts, group_size=1, step=1))
    # The fault was in that one copy: the next version arrives, and the engines sample again.
    loop.weight_sync.publish(version=version + 1)
    rollouts = members(loop.attempts.generate(prompts, group_size=1, step=1))
    assert {span.version for rollout in rollouts for span in rollout.spans} == {version + 1}


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
    with pytest.raises(WeightSyncFailed, match=f"version {version - 1} must be newer"):
        loop.weight_sync.publish(version=version - 1)


def die_at(worker: RolloutWorker, forward: int) -> None:
    """The engine's process is killed in the middle of its next `generate`, at this forward pass."""
    original, seen = worker.engine.model.forward, []

    def fatal(*arguments: object, **named: object) -> object:
        seen.append(1)
        if len(seen) == forward:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    worker.engine.model.forward = fatal


def test_an_engine_that_dies_while_it_samples_comes_back_with_the_present_weights(
    loop: OnlineLoop, version: int
) -> None:
    loop.weight_sync.publish(version=version)
    prompts = loop.prompts.evaluation_prompts()
    expected = members(loop.attempts.generate(prompts, group_size=2, step=1))
    restarts = loop.rollout.num_restarts
    in_engine(loop, 1, die_at, 3)
    assert members(loop.attempts.generate(prompts, group_size=2, step=1)) == expected
    assert loop.rollout.num_restarts == restarts + 1
    assert {span.version for rollout in expected for span in rollout.spans} == {version}
    # It takes part in what follows.
    loop.weight_sync.publish(version=version + 1)
    assert members(loop.attempts.generate(prompts, group_size=1, step=1))[0].spans[0].version == version + 1


def linger_at(worker: RolloutWorker, forward: int) -> None:
    """The next `generate` stops at this forward pass until it is asked to pause."""
    original, seen, engine = worker.engine.model.forward, [], worker.engine

    def slow(*arguments: object, **named: object) -> object:
        seen.append(1)
        if len(seen) == forward:
            worker.lingers = True
            until(lambda: engine._control.wanted, every_s=0.001)
            engine.model.forward = original
        return original(*arguments, **named)

    engine.model.forward = slow


def lingers(worker: RolloutWorker) -> bool:
    """Whether `generate` has come to that pass."""
    return getattr(worker, "lingers", False)


def test_a_sync_in_flight_keeps_running_requests_and_marks_their_parts(
    loop: OnlineLoop, version: int, batch: TrainBatch
) -> None:
    loop.weight_sync.publish(version=version)
    loop.policy.train(batch)
    prompts = loop.prompts.evaluation_prompts()
    sampling = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    before = members(loop.attempts.generate(prompts, group_size=1, step=1, sampling=sampling))
    for engine in (0, 1):
        in_engine(loop, engine, linger_at, 5)
    with ThreadPoolExecutor() as pool:
        sampled = pool.submit(loop.attempts.generate, prompts, group_size=1, step=1, sampling=sampling)
        for actor in loop.rollout.workers.actors:
            until(lambda actor=actor: ray.get(actor.__ray_call__.remote(lingers), timeout=PATIENCE_S))
        loop.weight_sync.publish(version=version + 1)
        rollouts = members(sampled.result())
    for rollout, old in zip(rollouts, before, strict=True):
        first, second = rollout.spans
        assert (first.version, second.version) == (version, version + 1)
        # Forward pass 1 is the prompt's, so the 5th gives the 4th token.
        assert (first.end - first.start, second.end - second.start) == (4, 4)
        assert rollout.token_ids[: first.end].tolist() == old.token_ids[: first.end].tolist()
        assert second.end == len(rollout.token_ids) == len(old.token_ids)


def test_the_present_version_can_be_put_back(loop: OnlineLoop, version: int) -> None:
    loop.weight_sync.publish(version=version)
    prompts = loop.prompts.evaluation_prompts()
    expected = members(loop.attempts.generate(prompts, group_size=1, step=1))
    for engine in (0, 1):
        in_engine(loop, engine, lose_the_weights)
    loop.rollout.sleep()
    with pytest.raises(WeightSyncFailed, match="a sleep dropped them"):
        members(loop.attempts.generate(prompts, group_size=1, step=1))
    loop.rollout.wake()
    assert members(loop.attempts.generate(prompts, group_size=1, step=1)) == expected


def lose_the_weights(worker: RolloutWorker) -> None:
    """The next sleep of this engine drops its weights, as a deep sleep on a GPU does."""
    engine = worker.engine

    def deep_sleep() -> None:
        for parameter in engine.model.parameters():
            parameter.fill_(float("nan"))
        engine.weights_lost = True
        del engine.sleep

    engine.sleep = deep_sleep


def test_engines_answer_as_one_that_loaded_the_exported_checkpoint(
    loop: OnlineLoop, version: int, tmp_path: Path
) -> None:
    loop.weight_sync.publish(version=version)
    write_checkpoint(tmp_path, loop.policy.export(torch.float32))
    copy_sidecars(resolve(loop.policy.setup.model), tmp_path, dtype=torch.float32)
    fresh = TransformersEngine(TransformersConfig(), folder=tmp_path, dtype=torch.float32, device="cpu")
    fresh.gate.commit(version)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = loop.prompts.evaluation_prompts()
    requests = [GenerationRequest(input=prompt.input, sampling=greedy, seed=0) for prompt in prompts]
    rollouts = members(loop.attempts.generate(prompts, group_size=1, step=1, sampling=greedy))
    for prompt, rollout, expected in zip(prompts, rollouts, fresh.generate(requests), strict=True):
        first = len(prompt.input)
        assert rollout.token_ids[first:].tolist() == expected.token_ids.tolist()
        # Engines of other batch sizes round otherwise.
        assert rollout.rollout_logprobs[first:] == pytest.approx(expected.logprobs, abs=1e-5)
