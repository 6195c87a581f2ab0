"""The interface of an algorithm: two pure functions and a config. One file each, in pure torch, without ray or
megatron."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.algorithms.requirements import Requirements, RunFacts
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import Divergence, LossOutput, Output, PolicyOutput
from rlframe.utils.faults import Fault


@runtime_checkable
class ForwardModel(Protocol):
    """Forward passes that an offline algorithm can run on the model's ranks before an optimizer step."""

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Float[Tensor, " T"]:
        """Returns [T] nats of each token under the present weights, or under the frozen reference."""
        ...

    def values(self, batch: Sequences) -> Float[Tensor, "T C"]:
        """Returns [T, C] the outputs of the head for each token. The model must have `Output.VALUES`."""
        ...

    def states(self, batch: Sequences) -> Float[Tensor, "R H"]:
        """Returns [R, H] the last hidden state at each sequence's last token in the loss. The model must have
        `Output.STATES`."""
        ...


class Algorithm(ABC):
    """Base of online and offline algorithms. A file of this folder ends `COMPONENT, CONFIG = Grpo, GrpoConfig`."""

    online: bool
    """True if the loop samples rollouts, False if it trains on given sequences."""
    output: Output = Output.TOKENS
    """The model output that the loss reads."""
    num_outputs: int = 1
    """Number of outputs C of `Output.VALUES`."""
    divergence: Divergence | None = None
    """The divergence that `Output.DIVERGENCE` computes."""
    needs_reference: bool = False
    """Whether batches must carry `reference_logprobs`."""
    reference_update: ReferenceUpdateConfig = ReferenceUpdateConfig()
    """Rule by which the reference follows the policy."""
    needs_teacher_logprobs: bool = False
    """Whether batches must carry `teacher_logprobs`."""
    needs_entropies: bool = False
    """Whether `with_entropies` must see the whole batch before its first optimizer step."""
    needs_rewards: bool = True
    """Whether an online algorithm learns from rewards. Otherwise rewards are for evaluation only."""
    precomputes_reference: bool = False
    """Whether the reference's logprobs can be computed in one pass before training, so that ranks need not hold the
    reference. Offline algorithms only, and only if `prepare` uses no sequences other than the dataset's."""
    group_size: int = 1
    """Number of rollouts G per prompt."""

    @property
    def needs_teacher(self) -> bool:
        """Returns whether the algorithm needs a teacher."""
        return self.needs_teacher_logprobs or self.output is Output.DIVERGENCE

    @property
    def asks_teacher(self) -> bool:
        """Returns whether batches must carry the teacher's outputs. If not, they are computed next to the policy's
        logits, or not needed."""
        return self.needs_teacher_logprobs or bool(self.divergence and self.divergence.top_k)

    @property
    def requirements(self) -> Requirements:
        """Returns what the algorithm asks of a run."""
        return Requirements(
            online=self.online,
            reference=self.needs_reference,
            precomputed_reference=self.precomputes_reference,
            teacher=self.needs_teacher,
            teacher_in_batch=self.asks_teacher,
            rewards=self.needs_rewards,
        )

    @property
    def model_outputs(self) -> int | None:
        """Number of outputs of the model's head for each token. None means logits over the vocabulary, 0 means no
        head."""
        return {Output.VALUES: self.num_outputs, Output.STATES: 0}.get(self.output)

    def with_entropies(self, batch: Sequences, entropies: Float[Tensor, " T"]) -> Sequences:
        """Returns the batch from train_batch with the data that the loss needs from the policy's entropies before the
        update, in nats."""
        raise AssertionError(f"{type(self).__name__} needs no entropies")

    def faults(self, *, hidden_size: int) -> list[Fault]:
        """Returns the faults of its settings with a model whose states have `hidden_size` numbers."""
        return []

    def cross_faults(self, facts: RunFacts) -> Iterator[Fault]:
        """Yields the faults of its settings in a run with these facts."""
        yield from ()

    def cautions(self, facts: RunFacts) -> Iterator[str]:
        """Yields a warning, logged once at the start, about each choice that is allowed in a run with these facts but
        likely to train badly."""
        yield from ()

    @abstractmethod
    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] the weight of each token in the loss of one optimizer step: its mask divided by a *global*
        denominator.

        It is called once with all sequences of the optimizer step, before they are split over ranks and micro-batches.
        The loss is then a plain sum, which no split can change. A loss of whole sequences or of pairs gives every token
        of a sequence the sequence's weight, and reads it back with `ops.sequences.sequence_weights`.
        """


class OnlineAlgorithm(Algorithm):
    """Learns from rewarded rollouts."""

    online = True
    critic: Algorithm | None = None
    """Algorithm that trains the critic, on the same batches as the policy. None if there is no critic."""
    critic_warmup_steps: int = 0
    """Number of steps at the start of the run that train the critic only."""
    needs_old_logprobs: bool = True
    """Whether batches that serve several updates must carry `old_logprobs`."""
    mask_truncated: bool = False
    """Whether attempts that reached a limit of tokens or turns are excluded from the loss."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Rule by which groups without a signal are replaced. None keeps them."""

    @property
    def requirements(self) -> Requirements:
        """Returns what the algorithm asks of a run."""
        return replace(
            super().requirements,
            critic=self.critic is not None,
            critic_warmup_steps=self.critic_warmup_steps,
            sampling=self.dynamic_sampling,
        )

    def with_values(self, batch: Batch, values: Float[Tensor, "T 1"]) -> Batch:
        """Returns the batch with `values` and `returns`, from the critic's values of each token and the tokens before
        it."""
        raise AssertionError(f"{type(self).__name__} has no critic")

    def train_batch(self, batch: Batch) -> TrainBatch:
        """Returns the whole batch with its advantages, the input of `loss`."""
        return batch.with_advantages(self.advantages(batch))

    @abstractmethod
    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] advantage of each sampled token; 0.0 where loss_mask is False. Sees whole groups."""

    @abstractmethod
    def loss(self, policy: PolicyOutput, batch: TrainBatch, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns this micro-batch's share of the loss: the sum over its tokens of weight times token loss.

        Args:
            weights: the micro-batch's part of `token_weights` of the whole optimizer step.
        """

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adjusts coefficients that change during a run, given the metrics of the last step. Returns metrics of its
        own."""
        return {}

    def state(self) -> dict[str, float]:
        """Returns the coefficients that `adapt` has changed, for checkpoints."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restores the coefficients that `state` returned."""


class OfflineAlgorithm(Algorithm):
    """Learns from given sequences."""

    online = False
    data: str = "examples"
    """Name of the file of `rlframe.data.kinds` that makes the batches."""
    needs_responses: bool = True
    """Whether it learns from the data's own responses. Otherwise their prompts suffice."""
    smallest_step: int = 1
    """Least number of items of an optimizer step."""

    @property
    def requirements(self) -> Requirements:
        """Returns what the algorithm asks of a run."""
        return replace(
            super().requirements, data=self.data, responses=self.needs_responses, smallest_step=self.smallest_step
        )

    def warning(self, batches: Iterable[Any]) -> str | None:
        """Returns a warning about the training data, logged once before training, or an empty string."""
        return None

    def prepare(self, batch: Sequences, model: ForwardModel) -> Sequences:
        """Returns the whole optimizer step's batch with further inputs of the loss, such as reference logprobs."""
        return batch

    @abstractmethod
    def loss(self, policy: Any, batch: Any, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns this micro-batch's share of the loss, as `OnlineAlgorithm.loss` does, for a batch of the algorithm's
        kind of data."""
