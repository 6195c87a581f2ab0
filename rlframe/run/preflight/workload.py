"""The work of a step: sequences, tokens, micro-batches."""

from dataclasses import dataclass
from functools import lru_cache

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The sequences of a step, all of the same length for the estimate."""

    prompts: int
    group: int
    """Sequences of a prompt, or of an item of given data."""
    prompt_tokens: int
    response_tokens: int
    """Mean tokens of a response; 0 if nothing is sampled."""
    longest_response: int
    sampled: bool
    """Whether engines write the responses."""

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.group

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.sequence_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """The division of the step of one role that trains."""

    updates: int
    """Optimizer steps."""
    microbatches: int
    """Micro-batches of an optimizer step on a rank."""
    tokens: int
    """Tokens of the largest micro-batch on a rank: shorter sequences fill it up."""
    mean_tokens: int
    """Tokens of the mean micro-batch on a rank."""
    keys_per_token: float
    """Tokens that attention reads for each one that is computed: more than 1 where sequences share a prompt."""
    predicted: float = 1.0
    """Share of the tokens that are computed which the loss counts: those of sampled responses. Of given sequences
    nobody knows how much is prompt."""


@lru_cache(maxsize=4096)
def layout_of(text: str | Parallel) -> Parallel:
    """Returns the layout of `train.parallel`. The search reads each many times."""
    return Parallel.parse(text)


def divide(workload: Workload, train: TrainConfig) -> Division:
    """Returns the division of a step. Whole sequences are packed into micro-batches of at most
    `train.max_tokens_per_microbatch` tokens a rank, whose context-parallel ranks share sequences."""
    parallel = layout_of(train.parallel)
    budget = train.max_tokens_per_microbatch * parallel.cp
    length = max(1, computed_tokens(workload, budget) if train.share_prompts else workload.sequence_tokens)
    fit = max(1, budget // length)
    share = max(1, -(-workload.sequences // (train.num_minibatches * parallel.dp)))
    microbatches = -(-share // fit)
    return Division(
        updates=train.num_minibatches * train.epochs_per_batch,
        microbatches=microbatches,
        tokens=max(1, min(share * length, budget) // parallel.cp),
        mean_tokens=max(1, share * length // microbatches // parallel.cp),
        keys_per_token=max(1, workload.sequence_tokens) / length,
        predicted=min(1.0, workload.response_tokens / length) if workload.response_tokens else 1.0,
    )


def computed_tokens(workload: Workload, budget: int) -> int:
    """Returns the tokens of a sequence that training computes if the sequences of a prompt compute it once, as many of
    them as a micro-batch of `budget` tokens holds. Of given sequences nobody knows how much is prompt."""
    if not workload.response_tokens:
        return workload.sequence_tokens
    together = (budget - workload.prompt_tokens) // workload.response_tokens
    together = max(1, min(workload.group, together))
    return workload.response_tokens + -(-workload.prompt_tokens // together)
