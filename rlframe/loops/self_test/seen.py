"""The observations of a self test: plain numbers, from which the checks judge."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from rlframe.loops.self_test.config import SelfTestConfig
from rlframe.types.batch import Batch, Sequences
from rlframe.types.rollout import Rollout
from rlframe.utils.process.memory import MemoryUse

Nats = list[list[float]]
"""Logprobs by sequence and token, without the first token of each sequence."""
FLOAT32_LIMIT_NATS, ROUNDED_LIMIT_NATS = 0.003, 0.06
"""Limits of the mean difference between engine and trainer where both compute in float32, and otherwise."""
ROUNDINGS = 2
"""Factor by which engine and trainer may differ more than the last bit of every weight moves the logprobs. A right
model's gap is about half that movement: 0.04 of 0.07 nats of SmolLM2-135M, whose sides agree in float32 to 7e-6."""
HARMFUL_NATS = 0.1
"""Mean difference that warns whatever its cause: importance ratios are then mostly noise."""
ONE_TOKEN = 20
"""Factor by which a single token may differ more than the mean, where rounding may choose another expert."""
UNLIKELY_TOKENS = 6
"""Factor by which tokens that nobody sampled may differ more: where logits are far apart, rounding is coarse."""
WARNING_SHARE = 1 / 3
"""Fraction of a limit from which on a check warns."""
NUM_BANDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The numbers above which a check warns and fails."""

    warns: float
    fails: float

    @classmethod
    def of(cls, fails: float) -> "Limit":
        """Returns the limit that warns above a third of where it fails."""
        return cls(warns=fails * WARNING_SHARE, fails=fails)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts about the settings that the checks must know."""

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
    given_adapter: bool = False
    """Whether the policy begins with an adapter of before, which its reference lacks."""
    single_turn: bool = True
    """Whether no environment answers the policy."""
    compiles: bool = False
    """Whether each new shape of a batch adds kernels to a cache, as oneDNN does for bfloat16 on a CPU."""
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
    """The observations after a step."""

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
    memory: Mapping[str, MemoryUse]
    """By process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """The mean change of the trainer's logprobs when the last bit of every weight flips."""

    sampled_nats: float
    """Change for the tokens in the loss."""
    fixed_nats: float
    """Change for the fixed sequences."""


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
    rounding_nats: float = 0.0
    """Mean change of the trainer's logprobs under the changed weights when their last bits flip too."""
    returned_nats: float = 0.0
    """Greatest change of the engines' logprobs after everything was undone."""
    disturbed: str = ""
    """Name of the tensor of which one bit was changed in an engine."""
    noticed: str = ""
    """Words of the proof about it. Empty if it saw nothing."""


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
    rounding: Rounding | None = None
    """None where engine and trainer compute in float32."""
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
    def limit_of_sampled(self) -> Limit:
        """Limit of the mean difference of sampled tokens: higher for a model that rounding moves more, as long as that
        does no harm."""
        measured = self.rounding.sampled_nats if self.rounding else 0.0
        return self._rounded(self.limit_nats, min(measured, HARMFUL_NATS))

    @property
    def limit_of_fixed(self) -> Limit:
        """Limit of the mean difference of sequences that nobody sampled."""
        return self._rounded(self._limit_of_unlikely_nats, self.rounding.fixed_nats if self.rounding else 0.0)

    @property
    def limit_of_changed(self) -> Limit:
        """Limit of the same under changed weights, whose logits are further apart."""
        return self._rounded(self._limit_of_unlikely_nats, self.sync.rounding_nats if self.sync else 0.0)

    @property
    def _limit_of_unlikely_nats(self) -> float:
        return self.limit_nats if self.facts.float32 else UNLIKELY_TOKENS * self.limit_nats

    def _rounded(self, least_nats: float, moved_nats: float) -> Limit:
        """Returns a limit for a model that the last bits of its weights move by so much. A limit of the settings
        stays."""
        least = Limit.of(least_nats)
        if self.settings.gap_limit_nats is not None:
            return least
        return Limit(warns=max(least.warns, moved_nats), fails=max(least.fails, ROUNDINGS * moved_nats))

    @property
    def limit_of_one_nats(self) -> float:
        """Limit of the difference of a single token."""
        return self.limit_nats if self.facts.float32 else ONE_TOKEN * self.limit_nats

    @property
    def rollout_batch(self) -> Batch | None:
        """The batch of the last step, if it has rollouts."""
        return self.batch if isinstance(self.batch, Batch) else None


def gap_of(batch: Batch, logprobs: Float[Tensor, " T"]) -> Gap | None:
    """Returns the gap of the tokens in the loss. None if there are none. NaN on either side is infinite."""
    mask = batch.loss_mask
    if not mask.any():
        return None
    difference = (logprobs.double() - batch.rollout_logprobs.double())[mask]
    # The largest of several numbers may pass NaN over.
    difference[difference.isnan()] = torch.inf
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
