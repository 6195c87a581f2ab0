"""Reference logprobs from a file: made once, and only ever found for the same weights and the same tokens."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from rlframe.data.config import DataConfig
from rlframe.data.kinds.preferences import PreferenceSource
from rlframe.loops.reference import PrecomputedReference, keys
from rlframe.models.hub import EMBEDDED
from rlframe.types.batch import Sequences

MODEL = EMBEDDED / "qwen3_moe_tiny"


class Policy:
    """Logprobs that depend on the tokens and on its weights, a number."""

    def __init__(self, weights: float):
        self.weights = weights
        self.computed = 0
        """Sequences."""

    def fingerprint(self) -> str:
        """Of the weights."""
        return str(self.weights)

    def logprobs(self, batch: Sequences) -> Tensor:
        """[T] nats."""
        self.computed += batch.num_sequences
        return -self.weights * batch.token_ids.float()


def precomputed(policy: Policy, folder: Path, stream: PreferenceSource) -> PrecomputedReference:
    """Filled."""
    reference = PrecomputedReference(policy, folder)  # type: ignore[arg-type]
    reference.fill(stream, print_line=lambda text: None)
    return reference


def pairs(count: int) -> PreferenceSource:
    """Of the built-in problems, tokenised for the embedded model."""
    config = DataConfig(path=f"arithmetic_preferences#{count}", evaluation_count=4, cache_folder=None)
    return PreferenceSource(config, tokenizer=AutoTokenizer.from_pretrained(MODEL), seed=0, max_tokens=100)


@pytest.fixture
def stream() -> PreferenceSource:
    """20 pairs to train on and 4 held out."""
    return pairs(20)


def test_all_data_is_answered_for_after_one_pass(tmp_path: Path, stream: PreferenceSource) -> None:
    policy = Policy(0.5)
    reference = precomputed(policy, tmp_path, stream)
    assert policy.computed == 48
    batch = stream.batch(stream.held_out() + stream.next(30))
    # The policy moves on; what the reference said stays.
    policy.weights = 2.0
    assert torch.equal(reference.logprobs(batch, reference=True), -0.5 * batch.token_ids)
    assert torch.equal(reference.logprobs(batch), -2.0 * batch.token_ids)


def test_the_file_serves_a_resumed_run(tmp_path: Path, stream: PreferenceSource) -> None:
    precomputed(Policy(0.5), tmp_path, stream)
    again = Policy(0.5)
    batch = stream.batch(stream.next(20))
    assert torch.equal(precomputed(again, tmp_path, stream).logprobs(batch, reference=True), -0.5 * batch.token_ids)
    assert again.computed == 0


def test_other_weights_find_nothing(tmp_path: Path, stream: PreferenceSource) -> None:
    precomputed(Policy(0.5), tmp_path, stream)
    other = Policy(0.25)
    batch = stream.batch(stream.next(3))
    assert torch.equal(precomputed(other, tmp_path, stream).logprobs(batch, reference=True), -0.25 * batch.token_ids)
    assert other.computed == 48


def test_of_other_data_only_what_is_new_is_computed(tmp_path: Path, stream: PreferenceSource) -> None:
    precomputed(Policy(0.5), tmp_path, stream)
    more = pairs(25)
    policy = Policy(0.5)
    batch = more.batch(more.next(25))
    assert torch.equal(precomputed(policy, tmp_path, more).logprobs(batch, reference=True), -0.5 * batch.token_ids)
    assert policy.computed == 10


def test_a_key_is_of_the_tokens_and_of_those_that_the_loss_counts() -> None:
    def key(tokens: list[int], learnt: list[bool]) -> bytes:
        lengths = torch.tensor([len(tokens)])
        return keys(Sequences(token_ids=torch.tensor(tokens), lengths=lengths, loss_mask=torch.tensor(learnt)))[0]

    once = key([1, 2], [False, True])
    assert once == key([1, 2], [False, True]) != key([2, 1], [False, True])
    # Its logprobs were not computed.
    assert once != key([1, 2], [False, False])
