"""What a self test has seen of a run: plain numbers, from which the checks judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.cluster.memory import MemoryInUse
from rlframe.loops.self_test.config import SelfTestConfig
from rlframe.types.batch import Batch, Sequences
from rlframe.types.rollout import Rollout

Nats = list[list[float]]
"""Logprobs by sequence and token, without the first token of each sequence."""
FLOAT32_LIMIT_NATS, ROUNDED_LIMIT_NATS = 0.003, 0.06
"""Limits of the mean difference between engine and trainer where both compute in float32, and otherwise."""
ONE_TOKEN = 20
"""Factor by which a single token may differ more than the mean, where rounding may choose another expert."""
WARNING_SHARE = 1 / 3
"""Fraction of a limit from which on a check warns."""
NUM_BANDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the checks must know of the settings."""

    online: bool
    """Whether engines sample what the policy trains on."""
    temperature: float = 1.0
    filtered: bool = False
    """Whether some tokens cannot be sampled: by top_p, top_k or min_tokens."""
    stop_tokens: Sequence[int] = ()
    """Tokens that end a response."""
    stop_strings: Sequence[str] = ()
    float32: bool = True
    """Whether the trainer and the engines compute in float32."""
    deterministic: bool = False
    """Whether the settings ask the trainer for the same bits (train.deterministic), or a CPU gives them anyway."""
    needs_reference: bool = False
    single_turn: bool = True
    """Whether no environment answers the policy."""
    dropout: bool = False
    """Whether training drops activations at random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The gap of the tokens at some positions of the responses."""

    first: int
    last: int
    mean_nats: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Difference between the logprobs of the engine that sampled and of the trainer."""

    mean_nats: float
    """Mean absolute difference over tokens."""
    max_nats: float
    mean_ratio: float
    """Mean over tokens of the trainer's probability divided by the engine's. 1 where both are the same."""
    bands: Sequence[Band]
    """By position in the response: equal numbers of tokens, the first positions first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """What was seen after a step."""

    step: int
    metrics: Mapping[str, float]
    weights: str
    """Digest of the policy's weights."""
    trainer: Nats
    """The trainer's logprobs of the fixed sequences."""
    engines: Sequence[Nats] = ()
    """The engines' logprobs of the fixed sequences, by engine."""
    gap: Gap | None = None
    """None if no token was sampled."""
    memory: Mapping[str, MemoryInUse]
    """By process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeats:
    """The last batch, done twice with the same weights."""

    logprobs: float
    """Greatest difference of a logprob in nats."""
    losses: Mapping[str, tuple[float, float]]
    """Metrics of the loss without a gradient, of both times."""
    trained: Mapping[str, tuple[float, float]]
    """Metrics of the training step, of both times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampled:
    """Responses to the same prompts: twice with the same seeds, then with other ones."""

    first: Sequence[Sequence[int]]
    """Tokens of each attempt."""
    again: Sequence[Sequence[int]]
    others: Sequence[Sequence[int]]


@dataclass(kw_only=True, slots=True)
class SyncSeen:
    """Weights that were changed, synced and changed back; and an engine's memory that was changed."""

    refusal: str = ""
    """The error of a sync that should have worked. Empty if all did."""
    moved_nats: float = 0.0
    """Mean change of the engines' logprobs when the sign of every weight changed."""
    gap_nats: float = 0.0
    """Mean difference between engines and trainer under the changed weights."""
    returned_nats: float = 0.0
    """Greatest change of the engines' logprobs after everything was undone."""
    disturbed: str = ""
    """Name of the tensor of which one bit was changed in an engine."""
    noticed: str = ""
    """What the proof said of it. Empty if it saw nothing."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """Everything that a self test has seen."""

    settings: SelfTestConfig
    facts: Facts
    weights: str = ""
    """Digest of the weights before the first step."""
    steps: list[StepSeen] = field(default_factory=list)
    refusal: str = ""
    """The error with which the run itself ended early. Empty if it did not."""
    rollouts: Sequence[Rollout] = ()
    """Rollouts of the last step."""
    batch: Sequences | None = None
    """The batch that the policy trained on in the last step."""
    token_weights: Float[Tensor, " T"] | None = None
    """[T] weight of each token of the batch in the loss."""
    logprobs: Float[Tensor, " T"] | None = None
    """[T] nats of the batch under the policy. None if its head gives none."""
    entropies: Float[Tensor, " T"] | None = None
    """[T] nats, entropy of the distribution from which each token of the batch was sampled."""
    reference: Float[Tensor, " T"] | None = None
    """[T] nats of the batch under the reference."""
    at_temperature: Float[Tensor, " T"] | None = None
    """[T] nats of the first sequences of the batch under the policy, at the temperature that the settings name."""
    gaps_by_temperature: Mapping[float, float] = field(default_factory=dict)
    """Mean difference between engine and trainer in nats, if the trainer divides the logits by this temperature."""
    repeats: Repeats | None = None
    resampled: Resampled | None = None
    sync: SyncSeen | None = None

    @property
    def limit_nats(self) -> float:
        """Limit of the mean difference between engine and trainer."""
        if self.settings.gap_limit_nats is not None:
            return self.settings.gap_limit_nats
        return FLOAT32_LIMIT_NATS if self.facts.float32 else ROUNDED_LIMIT_NATS

    @property
    def limit_of_one_nats(self) -> float:
        """Limit of the difference of a single token."""
        return self.limit_nats if self.facts.float32 else ONE_TOKEN * self.limit_nats

    @property
    def rollout_batch(self) -> Batch | None:
        """The batch of the last step, if it has rollouts."""
        return self.batch if isinstance(self.batch, Batch) else None


def gap_of(batch: Batch, logprobs: Float[Tensor, " T"]) -> Gap | None:
    """Returns the gap of the tokens in the loss. None if there are none."""
    mask = batch.loss_mask
    if not mask.any():
        return None
    difference = (logprobs.double() - batch.rollout_logprobs.double())[mask]
    sizes = difference.abs()
    positions = position_in_response(batch)[mask]
    order = positions.argsort(stable=True)
    bands = [
        Band(
            first=int(positions[part].min()),
            last=int(positions[part].max()),
            mean_nats=float(sizes[part].mean()),
            count=len(part),
        )
        for part in order.chunk(NUM_BANDS)
    ]
    return Gap(
        mean_nats=float(sizes.mean()),
        max_nats=float(sizes.max()),
        mean_ratio=float(difference.exp().mean()),
        bands=bands,
    )


def position_in_response(batch: Sequences) -> Tensor:
    """Returns [T] the number of tokens in the loss that precede each token in its sequence."""
    counted = batch.loss_mask.long()
    before = counted.cumsum(0) - counted
    starts = batch.lengths.cumsum(0) - batch.lengths
    return before - torch.repeat_interleave(before[starts.clamp(max=len(before) - 1)], batch.lengths)


def differences(one: Nats, other: Nats) -> list[float]:
    """Returns the absolute difference of each token. NaN on either side is infinite."""
    pairs = [pair for each in zip(one, other, strict=True) for pair in zip(*each, strict=True)]
    sizes = [abs(mine - theirs) for mine, theirs in pairs]
    return [size if size == size else float("inf") for size in sizes]


def mean_difference(one: Nats, other: Nats) -> float:
    """Returns the mean of `differences`."""
    found = differences(one, other)
    return sum(found) / len(found) if found else 0.0
