"""What an algorithm is: two pure functions and a config. One file each, pure torch, no ray and no megatron."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.reference import ReferenceUpdateConfig
from rlframe.algorithms.requirements import Requirements
from rlframe.types.batch import Batch, Sequences, TrainBatch
from rlframe.types.results import Divergence, LossOutput, Output, PolicyOutput
from rlframe.utils.faults import Fault


@runtime_checkable
class ForwardModel(Protocol):
    """Answers what an offline algorithm may ask of the model's ranks before an optimizer step. Forward passes only."""

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Float[Tensor, " T"]:
        """[T] nats of each token under the weights as they are, or under the frozen reference."""
        ...

    def values(self, batch: Sequences) -> Float[Tensor, "T C"]:
        """[T, C] what the head gives for each token; of a model with `Output.VALUES`."""
        ...

    def states(self, batch: Sequences) -> Float[Tensor, "R H"]:
        """[R, H] the last hidden state at each sequence's last token in the loss; of a model with `Output.STATES`."""
        ...


class Algorithm(ABC):
    """Base of online and offline algorithms. A file of this folder ends `COMPONENT, CONFIG = Grpo, GrpoConfig`."""

    online: bool
    """True when the loop must sample rollouts; False when it trains on given sequences."""
    output: Output = Output.TOKENS
    """What the loss reads of the model."""
    num_outputs: int = 1
    """C of `Output.VALUES`."""
    divergence: Divergence | None = None
    """What `Output.DIVERGENCE` holds."""
    needs_reference: bool = False
    """True when batches must carry `reference_logprobs`."""
    reference_update: ReferenceUpdateConfig = ReferenceUpdateConfig()
    """How the reference follows the policy."""
    needs_teacher_logprobs: bool = False
    """True when batches must carry `teacher_logprobs`."""
    needs_entropies: bool = False
    """True when `with_entropies` must see the whole batch before its first optimizer step."""
    needs_rewards: bool = True
    """True when an online algorithm learns from rewards; else they are for evaluation only."""
    precomputes_reference: bool = False
    """True when one pass before training is to find the reference's logprobs, so that the ranks need no reference: of
    an offline algorithm whose `prepare` asks for those of the data's own sequences and no others."""
    group_size: int = 1
    """G, rollouts sampled per prompt."""

    @property
    def needs_teacher(self) -> bool:
        """True when there must be a teacher."""
        return self.needs_teacher_logprobs or self.output is Output.DIVERGENCE

    @property
    def asks_teacher(self) -> bool:
        """True when batches must carry the teacher's word; else it is needed where the policy's logits are, or not."""
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
        """Numbers that the model's head gives for a token; None for logits over the vocabulary, 0 without a head."""
        return {Output.VALUES: self.num_outputs, Output.STATES: 0}.get(self.output)

    def with_entropies(self, batch: Sequences, entropies: Float[Tensor, " T"]) -> Sequences:
        """Returns the batch, as train_batch gave it, with what the loss is to know of the policy's entropies before the
        update, in nats."""
        raise AssertionError(f"{type(self).__name__} needs no entropies")

    def faults(self, *, hidden_size: int) -> list[Fault]:
        """Returns the faults of its settings with a model whose states have `hidden_size` numbers."""
        return []

    @abstractmethod
    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """[T] what each token's loss counts in one optimizer step: its mask over a *global* denominator.

        Called once with all sequences of the optimizer step, before they are split over ranks and micro-batches;
        a loss is then a plain sum, and no split can change it. A loss of whole sequences or of pairs gives every token
        of a sequence the sequence's weight, and reads it back with `ops.sequences.sequence_weights`.
        """


class OnlineAlgorithm(Algorithm):
    """Learns from rewarded rollouts."""

    online = True
    critic: Algorithm | None = None
    """How the critic is trained, on the same batches as the policy; None for an algorithm without one."""
    critic_warmup_steps: int = 0
    """First steps of the run that train the critic only."""
    bypass: bool = False
    """True when the engine's logprobs serve as `old_logprobs`, which batches then do without."""
    mask_truncated: bool = False
    """True when rollouts that ran out of tokens stay out of the loss."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """How groups without a signal are replaced; None keeps them."""

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
        """The batch with `values` and `returns`, from what the critic says given the tokens up to and with each."""
        raise AssertionError(f"{type(self).__name__} has no critic")

    def train_batch(self, batch: Batch) -> TrainBatch:
        """The whole batch with its advantages, as `loss` gets it."""
        return batch.with_advantages(self.advantages(batch))

    @abstractmethod
    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """[T] advantage of each sampled token; 0.0 where loss_mask is False. Sees whole groups."""

    @abstractmethod
    def loss(self, policy: PolicyOutput, batch: TrainBatch, weights: Float[Tensor, " T"]) -> LossOutput:
        """This micro-batch's share of the loss: sum over its tokens of weights times the token loss.

        Args:
            weights: the micro-batch's part of `token_weights` of the whole optimizer step.
        """

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adjusts what changes during a run to the metrics of the step just done; gives metrics of its own."""
        return {}

    def state(self) -> dict[str, float]:
        """Returns what `adapt` has changed, for checkpoints."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Goes on from what `state` gave."""


class OfflineAlgorithm(Algorithm):
    """Learns from given sequences."""

    online = False
    data: str = "examples"
    """Which file of `rlframe.data.kinds` makes the batches."""
    needs_responses: bool = True
    """True when it learns from the data's own responses; else their prompts are enough."""
    smallest_step: int = 1
    """Items that an optimizer step needs at least."""

    @property
    def requirements(self) -> Requirements:
        """Returns what the algorithm asks of a run."""
        return replace(
            super().requirements, data=self.data, responses=self.needs_responses, smallest_step=self.smallest_step
        )

    def warning(self, batches: Iterable[Any]) -> str | None:
        """What the user should know about the data to train on, said once before training."""
        return None

    def prepare(self, batch: Sequences, model: ForwardModel) -> Sequences:
        """The whole optimizer step's batch with what the loss needs besides, such as reference logprobs."""
        return batch

    @abstractmethod
    def loss(self, policy: Any, batch: Any, weights: Float[Tensor, " T"]) -> LossOutput:
        """As `OnlineAlgorithm.loss`, for a batch of the algorithm's kind of data, and the output it reads."""
