"""The known-answer probe: its sequences, its numbers, its sentence."""

import math

import pytest
import torch

from rlframe.loops.probe import Probe, probe_sequences
from rlframe.types.batch import Sequences
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import WeightSyncFailed

SEQUENCES = [ModelInput((5, 6, 7)), ModelInput((8, 9))]
TRAINER = [[-1.0, -2.0], [-3.0]]


class Words:
    """A tokenizer of one word per token."""

    def decode(self, tokens: list[int]) -> str:
        """Such as `w5 w6`."""
        return " ".join(f"w{token}" for token in tokens)


class Policy:
    """A trainer whose logprob of each token is its number, below zero."""

    def logprobs(self, batch: Sequences, *, temperature: float) -> torch.Tensor:
        """At temperature 1 only."""
        assert temperature == 1.0
        return -batch.token_ids.float() * batch.loss_mask


def probe(limit_nats: float = 0.5) -> Probe:
    return Probe(SEQUENCES, tokenizer=Words(), limit_nats=limit_nats)


def test_each_sequence_is_a_prompt_and_the_next_one() -> None:
    prompts = [Prompt(id=str(index), text="", input=ModelInput((index, index))) for index in range(3)]
    assert probe_sequences(prompts, count=3, max_tokens=3) == [
        ModelInput(each) for each in ((0, 0, 1), (1, 1, 2), (2, 2, 0))
    ]
    # One prompt is enough.
    assert probe_sequences(prompts[:1], count=2, max_tokens=9) == [ModelInput((0, 0, 0, 0))] * 2


def test_the_trainer_answers_for_every_token_but_the_first() -> None:
    assert probe().trainer_nats(Policy()) == [[-6.0, -7.0], [-9.0]]  # pyright: ignore[reportArgumentType]


def test_the_worst_engine_is_reported() -> None:
    # Engine 0 differs by 0.3 in one of three tokens: mean 0.1. Engine 1 by 0.2 in each: mean 0.2, greatest 0.2.
    engines = [[[-1.0, -2.3], [-3.0]], [[-1.2, -2.2], [-3.2]]]
    metrics = probe().compare(engines, TRAINER, version=4)
    assert metrics == pytest.approx({"weight_sync/probe_mean_nats": 0.2, "weight_sync/probe_max_nats": 0.3})


def test_a_mean_above_the_limit_names_engine_token_and_both_values() -> None:
    # Mean (0 + 4 + 0.5) / 3 = 1.5.
    engines = [TRAINER, [[-1.0, -6.0], [-3.5]]]
    with pytest.raises(WeightSyncFailed) as caught:
        probe().compare(engines, TRAINER, version=4)
    text = str(caught.value)
    assert text.startswith("engine 1 holds the weights of version 4 according to their digests, but computes")
    assert "over 3 tokens" in text and "1.5 nats on average" in text and "weight_sync.probe_limit_nats is 0.5" in text
    assert "'w7' at position 2 of sequence 0, after 'w5 w6': -6.0000 nats in the engine, -2.0000 in the trainer" in text


def test_one_bad_token_is_no_fault_while_the_mean_is_low() -> None:
    engines = [[[-1.0, -3.0], [-3.0]]]
    assert probe().compare(engines, TRAINER, version=4)["weight_sync/probe_max_nats"] == 1.0


def test_a_nan_is_a_fault() -> None:
    with pytest.raises(WeightSyncFailed, match="nan"):
        probe().compare([[[-1.0, math.nan], [-3.0]]], TRAINER, version=4)
