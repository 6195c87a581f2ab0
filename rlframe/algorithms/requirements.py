"""What an algorithm asks of a run besides its loss. Whoever composes the run reads this, and knows no algorithm."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig


class Writer(StrEnum):
    """Who writes the responses that the policy does not."""

    DATA = "data"
    TEACHER = "teacher"


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenResponses:
    """A sampler: in some steps the responses are those of `writer`, in the others the policy samples."""

    writer: Writer
    samples: Callable[[int, int], bool]
    """Whether the policy samples in a step, given the run's seed and the step."""


Sampling = DynamicSamplingConfig | GivenResponses | Callable[..., Any] | None
"""Where the rollouts of a step come from: groups without a signal are replaced; some responses are given; an own class,
called with the fields of `loops.sampling.Sampler`; or, None, every prompt once and every rollout kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What an algorithm, with its settings, asks of a run."""

    online: bool
    """Rollouts are sampled; else it trains on given sequences."""
    reference: bool
    """Batches carry `reference_logprobs`."""
    precomputed_reference: bool
    """They are computed before training, so that the ranks need no reference."""
    teacher: bool
    """There must be a teacher."""
    teacher_in_batch: bool
    """Batches carry the teacher's word; else it is needed where the policy's logits are, or not at all."""
    teacher_coefficient: float | None = None
    """Value of `algorithm.distillation_coefficient`, above 0 where a teacher is wanted; None without such a setting."""
    critic: bool = False
    """A critic is trained on the same batches as the policy, as `OnlineAlgorithm.critic` says."""
    critic_warmup_steps: int = 0
    """First steps of the run that train the critic only."""
    rewards: bool
    """It learns from rewards; else they are for evaluation only."""
    sampling: Sampling = None
    """Its sampler."""
    samples_policy: bool = True
    """The policy samples in some steps at least."""
    data: str | None = None
    """The file of `rlframe.data.kinds` that makes batches of the data's own sequences; None where it has no use for
    them."""
    responses: bool = False
    """It learns from the data's own responses, in some steps at least; else their prompts are enough."""
    smallest_step: int = 1
    """Items that an optimizer step needs at least."""
    nll_coefficient: float = 0.0
    """Weight of the likelihood of responses that the policy did not sample."""

    @property
    def teacher_writes(self) -> bool:
        """Whether the teacher writes responses, in engines of its own."""
        return isinstance(self.sampling, GivenResponses) and self.sampling.writer is Writer.TEACHER
