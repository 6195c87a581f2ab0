"""The requirements of an algorithm for a run. The code that composes a run reads only these, and knows no algorithm by
name."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig


class Writer(StrEnum):
    """The author of responses that the policy does not sample."""

    DATA = "data"
    TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenResponses:
    """A sampler that uses responses of `writer` in some steps, and samples from the policy in the others."""

    writer: Writer
    samples: Callable[[int, int], bool]
    """Returns whether the policy samples in a step, given the run's seed and the step."""


Sampling = DynamicSamplingConfig | GivenResponses | Callable[..., Any] | None
"""The sampler of a step's rollouts: one that replaces groups without a signal; one that uses given responses; a class
of one's own, called with the fields of `loops.sampling.base.Sampler`; or None, which samples every prompt once and
keeps every rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """The requirements of an algorithm with its settings."""

    online: bool
    """True if rollouts are sampled, False if it trains on given sequences."""
    reference: bool
    """Whether batches carry `reference_logprobs`."""
    precomputed_reference: bool
    """Whether the reference's logprobs are computed before training, so that the ranks need no reference."""
    teacher: bool
    """Whether the algorithm needs a teacher."""
    teacher_in_batch: bool
    """Whether batches carry the teacher's outputs. Otherwise they are computed next to the policy's logits, or not
    needed."""
    teacher_coefficient: float | None = None
    """Value of `algorithm.distillation_coefficient`. Above 0 the algorithm needs a teacher. None without such a
    setting."""
    critic: bool = False
    """Whether a critic is trained on the same batches as the policy, by `OnlineAlgorithm.critic`."""
    critic_warmup_steps: int = 0
    """Number of steps at the start of the run that train the critic only."""
    rewards: bool
    """Whether it learns from rewards. Otherwise rewards are for evaluation only."""
    sampling: Sampling = None
    """The sampler of the algorithm."""
    samples_policy: bool = True
    """Whether the policy samples in at least some steps."""
    data: str | None = None
    """Name of the file of `rlframe.data.kinds` that makes batches of the data's own sequences. None if it uses none."""
    responses: bool = False
    """Whether it learns from the data's own responses in at least some steps. Otherwise their prompts suffice."""
    smallest_step: int = 1
    """Least number of items of an optimizer step."""
    nll_coefficient: float = 0.0
    """Weight of the likelihood of responses that the policy did not sample."""

    @property
    def samples_ahead(self) -> bool:
        """Returns whether its sampler can sample for later steps while the policy trains."""
        return self.sampling is None or isinstance(self.sampling, DynamicSamplingConfig)

    @property
    def teacher_writes(self) -> bool:
        """Returns whether the teacher writes responses, in engines of its own."""
        return isinstance(self.sampling, GivenResponses) and self.sampling.writer is Writer.TEACHER


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """The facts of a run that the settings of an algorithm can contradict."""

    updates_per_batch: int
    """Number of optimizer steps on one rollout batch."""
    reward_names: tuple[str, ...]
    """Names of the rewards that score a rollout."""
    max_policy_lag: int = 0
    """Greatest number of versions by which a token may be older than the policy that trains on it."""
    engine_rounds: str = ""
    """Setting by which engines compute in fewer bits than the trainer. Empty if there is none."""

    @property
    def one_update(self) -> str | None:
        """Reason for which the policy of a rollout batch is the old policy throughout; None if it is not."""
        reason = "train.num_minibatches * train.epochs_per_batch = 1"
        return reason if self.updates_per_batch == 1 else None
