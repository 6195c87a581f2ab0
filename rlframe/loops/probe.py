"""The known-answer probe: compares the logprobs of engines and trainer on the same fixed tokens, after a sync.

The digests prove that the weights are where the engine's loader puts them. The probe tests whether the engine computes
with them as the trainer does. It detects faults that no digest can, such as weights that the engine reads from a
second, repacked copy, another rotary base, or a stale cache.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rlframe.megatron.driver.policy import PolicyGroup
from rlframe.types.batch import Sequences
from rlframe.types.input import ModelInput
from rlframe.types.prompt import Prompt
from rlframe.utils.errors import WeightSyncFailed

MIN_SEQUENCES = 4
"""Least number of sequences. There is one for each data-parallel rank if there are more ranks."""
MAX_TOKENS = 256
"""Greatest number of tokens of a sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference of one engine's logprobs from the trainer's."""

    engine: int
    mean_nats: float
    """Mean absolute difference."""
    max_nats: float
    sequence: int
    """Index of the sequence with the greatest difference."""
    position: int
    engine_nats: float
    trainer_nats: float


class Probe:
    """Fixed sequences, and the comparison of their logprobs."""

    def __init__(self, sequences: list[ModelInput], *, tokenizer: Any, limit_nats: float):
        """
        Args:
            sequences: fixed sequences, each of at least 2 tokens.
            tokenizer: to show a token in a message.
            limit_nats: bound of the mean difference. Single tokens may differ by more: in bfloat16 rounding may decide
                which expert a router chooses.
        """
        self.sequences, self._tokenizer, self._limit_nats = sequences, tokenizer, limit_nats

    def trainer_nats(self, policy: PolicyGroup) -> list[list[float]]:
        """Returns by sequence the nats of each token but the first under the trainer's weights, at temperature 1."""
        lengths = torch.tensor([len(sequence) for sequence in self.sequences])
        tokens = torch.tensor([token for sequence in self.sequences for token in sequence.token_ids.tolist()])
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[lengths.cumsum(0) - lengths] = False
        batch = Sequences(token_ids=tokens, lengths=lengths, loss_mask=mask)
        return [each[1:].tolist() for each in policy.logprobs(batch, temperature=1.0).split(lengths.tolist())]

    def compare(
        self, engines: list[list[list[float]]], trainer: list[list[float]], *, version: int | None
    ) -> dict[str, float]:
        """Returns metrics of the difference, of the worst engine.

        Args:
            engines: logprobs by engine, then as in `trainer_nats`.

        Raises:
            WeightSyncFailed: an engine's mean is above the limit; the message names engine, token and both values.
        """
        found = [difference(engine, answers, trainer) for engine, answers in enumerate(engines)]
        # A NaN on either side is worse than any number.
        worst = max(found, key=lambda each: torch.tensor(each.mean_nats).nan_to_num(nan=torch.inf).item())
        if not worst.mean_nats <= self._limit_nats:
            raise WeightSyncFailed(self._explain(worst, version))
        return {
            "weight_sync/probe_mean_nats": worst.mean_nats,
            "weight_sync/probe_max_nats": max(each.max_nats for each in found),
        }

    def _explain(self, worst: Difference, version: int | None) -> str:
        token = int(self.sequences[worst.sequence].token_ids[worst.position])
        before = self._tokenizer.decode(self.sequences[worst.sequence].token_ids[: worst.position].tolist())
        count = sum(len(sequence) - 1 for sequence in self.sequences)
        return (
            f"engine {worst.engine} holds the weights of version {version} according to their digests, "
            f"but computes other logprobs than the trainer: over {count} tokens of the probe the "
            f"logprobs differ by {worst.mean_nats:.4g} nats on average, weight_sync.probe_limit_nats is "
            f"{self._limit_nats:g}. Worst token: {self._tokenizer.decode([token])!r} at position "
            f"{worst.position} of sequence {worst.sequence}, after {before[-60:]!r}: "
            f"{worst.engine_nats:.4f} nats in the engine, {worst.trainer_nats:.4f} in the trainer"
        )


def difference(engine: int, answers: list[list[float]], trainer: list[list[float]]) -> Difference:
    """Returns the difference of the engine's `answers` from the trainer's."""
    places = [
        (abs(mine - theirs), sequence, position, mine, theirs)
        for sequence, pair in enumerate(zip(answers, trainer, strict=True))
        for position, (mine, theirs) in enumerate(zip(*pair, strict=True), start=1)
    ]
    _, sequence, position, mine, theirs = max(places, key=lambda place: (place[0] != place[0], place[0]))
    return Difference(
        engine=engine,
        mean_nats=sum(place[0] for place in places) / len(places),
        max_nats=abs(mine - theirs),
        sequence=sequence,
        position=position,
        engine_nats=mine,
        trainer_nats=theirs,
    )


def probe_sequences(prompts: list[Prompt], *, count: int, max_tokens: int) -> list[ModelInput]:
    """Returns `count` fixed sequences: each a prompt continued by the next prompt, truncated at `max_tokens`.

    The continuation need not make sense, because the logprob of any token depends on all of the model's weights.
    """
    chosen = [prompts[index % len(prompts)].input for index in range(count + 1)]
    return [
        ModelInput(first.then(second.token_ids).token_ids[:max_tokens])
        for first, second in zip(chosen, chosen[1:], strict=False)
    ]
