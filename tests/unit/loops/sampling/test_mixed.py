"""Who answers a step's prompts: the engines or the data, along one cursor."""

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlframe.attempts.leases import Leases
from rlframe.attempts.ledger import Ledger
from rlframe.data.config import DataConfig
from rlframe.data.prompts import PromptSource
from rlframe.loops.sampling.mixed import DataResponses, MixedSampler, responses
from rlframe.models.hub import EMBEDDED
from rlframe.ops.packing import pack
from rlframe.types.rollout import OFFLINE_VERSION, Completion, FinishReason, GenerationRequest, members
from rlframe.utils.errors import DataError
from tests.local_attempts import LocalAttempts, answering

CONFIG = DataConfig(path="arithmetic#40")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's."""
    return AutoTokenizer.from_pretrained(EMBEDDED / "qwen3_moe_tiny")


def nothing(request: GenerationRequest) -> Completion:
    """A response of one token."""
    return Completion(token_ids=[9], logprobs=[-1.0], versions=[0], finish_reason=FinishReason.STOP)


def sampler(tokenizer: PreTrainedTokenizerBase, sampled: set[int]) -> MixedSampler:
    """Over four prompts a step."""
    prompts = PromptSource(CONFIG, tokenizer=tokenizer, seed=0)
    examples = responses(CONFIG, prompts, tokenizer=tokenizer, seed=0, max_tokens=64)
    return MixedSampler(
        leases=Leases(prompts, Ledger(Path(tempfile.mkdtemp()))),
        attempts=LocalAttempts([answering(nothing)], lambda rollout: None),
        scorer=None,
        phase=lambda name, on=None: nullcontext(),  # type: ignore[arg-type]
        prompts_per_step=4,
        group_size=1,
        response_source=DataResponses(examples=examples, tokenizer=tokenizer),
        samples=lambda step: step in sampled,
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


def test_both_walk_one_stream_of_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    mixed = sampler(tokenizer, sampled={2})
    given = [group.prompt.id for group in mixed.collect(step=1)]
    assert mixed.metrics() == {"rollout/on_policy": 0.0}
    asked = [group.prompt.id for group in mixed.collect(step=2)]
    assert mixed.metrics() == {"rollout/on_policy": 1.0}
    given += [group.prompt.id for group in mixed.collect(step=3)]
    whole = [prompt.id for prompt in PromptSource(CONFIG, tokenizer=tokenizer, seed=0).next(12)]
    assert whole == given[:4] + asked + given[4:]


def test_a_prompt_whose_response_is_too_long_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = PromptSource(CONFIG, tokenizer=tokenizer, seed=0)
    with pytest.raises(DataError, match=r"in at most 5 tokens .* found 40 longer ones, such as \d+[+-]\d+="):
        responses(CONFIG, prompts, tokenizer=tokenizer, seed=0, max_tokens=5)


def test_a_response_of_weight_zero_is_named(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r", "weight": 0}]
    file.write_text(json.dumps({"messages": turns}))
    config = DataConfig(path=str(file), evaluation_count=0)
    prompts = PromptSource(config, tokenizer=tokenizer, seed=0)
    with pytest.raises(DataError, match="a.jsonl:1: expected a response to learn, found the weight 0"):
        responses(config, prompts, tokenizer=tokenizer, seed=0, max_tokens=50)
