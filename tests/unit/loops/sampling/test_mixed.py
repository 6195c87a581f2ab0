"""Who answers a step's prompts: the engines or the data, along one cursor."""

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlframe.attempts.account.leases import Leases
from rlframe.attempts.account.ledger import Dropped, Ledger, read_ledger
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.loops.sampling.mixed import DataResponses, MixedSampler, responses
from rlframe.models.hub import EMBEDDED
from rlframe.ops.packing import pack
from rlframe.types.rollout import OFFLINE_VERSION, Completion, FinishReason, GenerationRequest, Rollout, members
from rlframe.utils.errors import DataError, RlframeError
from tests.local_attempts import LocalAttempts, answering
from tests.unit.attempts.simulated.clock import FOR_EVER_S

CONFIG = DataConfig(path="arithmetic#40")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's."""
    return AutoTokenizer.from_pretrained(EMBEDDED / "qwen3_moe_tiny")


@pytest.fixture(scope="module")
def stream(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Ids of the prompts of an epoch."""
    return [prompt.id for prompt in PromptSource(CONFIG, tokenizer=tokenizer, seed=0).next(40)]


def nothing(request: GenerationRequest) -> Completion:
    """A response of one token."""
    return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)


def sampler(
    tokenizer: PreTrainedTokenizerBase, sampled: set[int], *, lost: Collection[str] = (), num_minibatches: int = 1
) -> MixedSampler:
    """Over four prompts a step. Attempts at the prompts `lost` do not end in time."""

    def observe(rollout: Rollout) -> Any:
        return asyncio.sleep(FOR_EVER_S) if rollout.prompt.id in lost else None

    prompts = PromptSource(CONFIG, tokenizer=tokenizer, seed=0)
    examples = responses(CONFIG, prompts, tokenizer=tokenizer, seed=0, max_tokens=64)
    return MixedSampler(
        leases=Leases(prompts, Ledger(Path(tempfile.mkdtemp()))),
        attempts=LocalAttempts([answering(nothing)], lambda rollout: None, observe=observe, attempt_timeout_s=1.0),
        scorer=None,
        phase=lambda name, on=None: nullcontext(),  # type: ignore[arg-type]
        prompts_per_step=4,
        group_size=1,
        response_source=DataResponses(examples=examples, tokenizer=tokenizer),
        samples=lambda step: step in sampled,
        num_minibatches=num_minibatches,
    )


def test_the_datas_responses_come_as_rollouts_that_no_policy_made(tokenizer: PreTrainedTokenizerBase) -> None:
    groups = sampler(tokenizer, set()).collect(step=1)
    rollouts = members(groups)
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout.text == rollout.prompt.answer
        begin = len(rollout.prompt.input)
        assert rollout.token_ids[:begin].tolist() == rollout.prompt.input.token_ids.tolist()
        # The answer's digits and the token that ends the turn.
        assert rollout.loss_mask.tolist() == [False] * begin + [True] * (len(rollout.prompt.answer or "") + 1)
    batch = pack(groups)
    assert batch.versions.tolist() == [OFFLINE_VERSION] * batch.num_tokens
    assert torch.equal(batch.rollout_logprobs, torch.zeros(batch.num_tokens))


def test_both_walk_one_stream_of_prompts(tokenizer: PreTrainedTokenizerBase, stream: list[str]) -> None:
    mixed = sampler(tokenizer, sampled={2})
    given = [group.prompt.id for group in mixed.collect(step=1)]
    assert mixed.metrics() == {"rollout/on_policy": 0.0}
    asked = [group.prompt.id for group in mixed.collect(step=2)]
    assert mixed.metrics() == {"rollout/on_policy": 1.0}
    given += [group.prompt.id for group in mixed.collect(step=3)]
    assert stream[:12] == given[:4] + asked + given[4:]


def test_prompts_without_a_response_are_replaced(tokenizer: PreTrainedTokenizerBase, stream: list[str]) -> None:
    mixed = sampler(tokenizer, {1}, lost=stream[:2])
    groups = mixed.collect(step=1)
    assert [group.prompt.id for group in groups] == stream[2:6] and len(members(groups)) == 4
    assert mixed.metrics() == {
        "rollout/on_policy": 1.0,
        "rollout/dropped_unsuccessful_groups": 2.0,
        "rollout/dropped_tokens": 2.0,
    }
    assert len(mixed.untrained) == 2
    mixed.settle(1)
    events = read_ledger(mixed.leases.ledger.file.parent).events
    assert Counter(each.event for each in events) == {"leased": 6, "trained": 4, "dropped": 2}
    dropped = [each for each in events if isinstance(each, Dropped)]
    assert [(each.lease, each.reason, each.tokens) for each in dropped] == [(0, "timed_out", 1), (1, "timed_out", 1)]


def test_a_batch_that_does_not_get_full_has_whole_minibatches(
    tokenizer: PreTrainedTokenizerBase, stream: list[str]
) -> None:
    mixed = sampler(tokenizer, {1, 2}, lost=stream[3:], num_minibatches=2)
    assert [group.prompt.id for group in mixed.collect(step=1)] == stream[:2]
    # One of the first four, and the one in its place in each of nine further rounds.
    dropped = {
        "rollout/dropped_unsuccessful_groups": 10.0,
        "rollout/dropped_left_over_groups": 1.0,
        "rollout/dropped_tokens": 11.0,
    }
    assert mixed.metrics() == {"rollout/on_policy": 1.0, **dropped}
    with pytest.raises(RlframeError, match="step 2: fewer than the 2 prompts that an update needs got a response, in"):
        mixed.collect(step=2)


def test_a_prompt_whose_response_is_too_long_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = PromptSource(CONFIG, tokenizer=tokenizer, seed=0)
    with pytest.raises(DataError, match=r"in at most 5 tokens .* found 40 longer ones, such as \d+[+-]\d+="):
        responses(CONFIG, prompts, tokenizer=tokenizer, seed=0, max_tokens=5, max_positions=64)
    with pytest.raises(DataError, match=r"in at most 5 tokens \(the model's positions\), found 40 longer ones"):
        responses(CONFIG, prompts, tokenizer=tokenizer, seed=0, max_tokens=64, max_positions=5)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (0, "expected a response to learn, found the weight 0"),
        (0.5, "expected .* 0 or 1, .*, found the weight 0.5; give"),
    ],
)
def test_a_response_of_another_weight_than_one_is_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, weight: float, why: str
) -> None:
    file = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r", "weight": weight}]
    file.write_text(json.dumps({"messages": turns}))
    config = DataConfig(path=str(file), evaluation_count=0)
    prompts = PromptSource(config, tokenizer=tokenizer, seed=0)
    with pytest.raises(DataError, match=f"a.jsonl:1: {why}"):
        responses(config, prompts, tokenizer=tokenizer, seed=0, max_tokens=50)
