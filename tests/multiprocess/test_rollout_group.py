"""RolloutGroup over real Ray actors: order, seeds, turns, versions."""

from pathlib import Path

import pytest
import torch

from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import reserve
from rlframe.cluster.runtime import running
from rlframe.environments.base import Environment
from rlframe.models.config import ModelConfig
from rlframe.rollout.config import EngineDtype
from rlframe.rollout.group import RolloutGroup, RolloutSetup
from rlframe.rollout.transformers import TransformersConfig, TransformersEngine
from rlframe.types.prompt import Prompt
from rlframe.types.rollout import FinishReason, GenerationRequest, Rollout, SamplingParams
from rlframe.utils.errors import WeightSyncFailed
from tests.rollout_models import make_with_tokenizer

PROMPTS = [Prompt(id=f"p{index}", text="", token_ids=tuple(range(5, 7 + 3 * index))) for index in range(5)]


class OneMoreTurn(Environment):
    """Answers the first response with three tokens, and ends the attempt after the second."""

    def __init__(self, config: None):
        pass

    def respond(self, rollout: Rollout) -> list[int] | None:
        return [3, 10, 4] if len(rollout.segments) == 1 else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_with_tokenizer("qwen3_moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """Two engines, verified at version 0."""
    from transformers import AutoTokenizer

    setup = RolloutSetup(
        rollout=TransformersConfig(num_engines=2, max_tokens=6),
        model=ModelConfig(path=str(folder)),
        dtype=EngineDtype.FLOAT32,
        device=Device.CPU,
        seed=11,
    )
    with running(ClusterConfig(), num_devices=2):
        placement = reserve(num_ranks=1, num_engines=2, colocate=True, gpu=False, timeout_s=60)
        engines = RolloutGroup(
            setup,
            tokenizer=AutoTokenizer.from_pretrained(folder),
            slots=placement.engines,
            log_folder=str(tmp_path_factory.mktemp("logs")),
            num_threads=1,
            start_timeout_s=120,
            call_timeout_s=60,
        )
        engines.start()
        engines.begin(0)
        engines.commit(0)
        yield engines
        engines.workers.stop()
        placement.release()


def test_rollouts_come_by_prompt_then_sample_and_repeat(group: RolloutGroup):
    rollouts = group.generate(PROMPTS, group_size=3, step=1)
    expected = [(f"p{index}", sample) for index in range(5) for sample in range(3)]
    assert [(rollout.prompt.id, rollout.sample_index) for rollout in rollouts] == expected
    for rollout in rollouts:
        first = len(rollout.prompt.token_ids)
        assert tuple(rollout.token_ids[:first]) == rollout.prompt.token_ids
        assert rollout.loss_mask == [False] * first + [True] * (len(rollout.token_ids) - first)
        assert rollout.rollout_logprobs[:first] == [0.0] * first
        assert all(logprob < 0 for logprob in rollout.rollout_logprobs[first:])
        words = [f"w{token}" for token in rollout.token_ids[first:] if token > 4]
        assert [word for word in rollout.text.split() if word.startswith("w")] == words
        assert "<eos>" not in rollout.text
    assert group.generate(PROMPTS, group_size=3, step=1) == rollouts
    assert group.generate(PROMPTS, group_size=3, step=2) != rollouts
    # Who else is asked does not matter: a prompt alone, on one engine, gets the same answers.
    alone = group.generate(PROMPTS[3:4], group_size=3, step=1)
    assert [rollout.token_ids for rollout in alone] == [rollout.token_ids for rollout in rollouts[9:12]]


def test_a_sampling_override_is_greedy(group: RolloutGroup, folder: Path):
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    engine = TransformersEngine(TransformersConfig(), folder=folder, dtype=torch.float32, device="cpu")
    engine.weights.begin(0)
    engine.weights.commit(0)
    requests = [GenerationRequest(token_ids=prompt.token_ids, sampling=sampling, seed=0) for prompt in PROMPTS]
    expected = [
        [*request.token_ids, *each.token_ids] for request, each in zip(requests, engine.generate(requests), strict=True)
    ]
    rollouts = group.generate(PROMPTS, group_size=1, step=0, sampling=sampling)
    assert [rollout.token_ids for rollout in rollouts] == expected


def test_the_environment_answers_and_its_tokens_are_masked(group: RolloutGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "environment", OneMoreTurn(None))
    for rollout in group.generate(PROMPTS, group_size=2, step=1):
        first, second = rollout.segments
        assert second.start == first.end + 3
        assert rollout.token_ids[first.end : second.start] == [3, 10, 4]
        assert rollout.loss_mask[first.end : second.start] == [False] * 3
        assert rollout.rollout_logprobs[first.end : second.start] == [0.0] * 3
        assert second.end == len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.rollout_logprobs)


def test_an_attempt_without_room_for_another_response_ends_by_length(
    group: RolloutGroup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group, "environment", OneMoreTurn(None))
    monkeypatch.setattr(group, "max_positions", 16)
    (rollout,) = group.generate(PROMPTS[:1], group_size=1, step=1, sampling=SamplingParams(max_tokens=6, min_tokens=6))
    assert len(rollout.segments) == 1 and len(rollout.token_ids) == 8
    assert rollout.finish_reason is FinishReason.LENGTH


def test_a_completion_of_another_version_is_refused(group: RolloutGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "version", 1)
    with pytest.raises(WeightSyncFailed, match="version 0, expected 1"):
        group.generate(PROMPTS, group_size=1, step=1)


def test_an_engine_with_unverified_weights_refuses(group: RolloutGroup):
    group.begin(1)
    with pytest.raises(WeightSyncFailed, match="not verified"):
        group.generate(PROMPTS, group_size=1, step=1)
    group.commit(1)
    assert group.generate(PROMPTS, group_size=1, step=1)[0].segments[0].version == 1
