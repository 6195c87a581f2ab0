"""One optimizer step's data of every kind, and a model's word on it: what test_algorithms.py splits in many ways."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from rlframe.algorithms.base import Algorithm, ForwardModel, OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.credit import Credit, CreditConfig, Peers
from rlframe.ops.sequences import last_tokens
from rlframe.types.batch import Batch, Sequences
from rlframe.types.results import DivergenceOutput, Output, PolicyOutput, StateOutput, ValueOutput
from rlframe.types.rollout import OFFLINE_VERSION
from rlframe.types.supervised import Contrasted, Labelled, Preferences, Unpaired

LENGTHS = [4, 7, 3, 5, 2, 6, 9, 1, 5, 8, 3, 6]
GROUP_SIZE = 4
MASKED_OUT = 4
"""A rollout none of whose tokens counts, such as one that was cut off and filtered."""
PAIRS = [0, 1, 0, 2, 9, 2, 1, 9, 5, 3, 5, 3]
"""Which sequences belong together; those of pair 9 are masked out, one of them by its length."""
FIRST_IS_CHOSEN = [True, False, False, True, True, False, True, False, False, True, True, False]
LISTS = [0, 7, 7, 0, 2, 7, 0, 2, 0, 3, 3, 3]
"""Which query each sequence belongs to; one of the query 2 is masked out by its mask, one by its length."""
ROLES = [0, 1, 0, 1, 0, 2, 2, 1, 2, 2, 1, 0]
"""Of the same lists: each has a query and a positive."""
HIDDEN = 5
CREDITS = {
    "grpo": [
        {"credit": CreditConfig(by=Credit.TURN, discount=0.5, peers=Peers.ALL_TURNS)},
        {"credit": CreditConfig(by=Credit.STATE, discount=0.5)},
    ]
}
"""Settings of algorithms whose advantages are those of turns."""


@dataclasses.dataclass
class Scene:
    """One optimizer step's data, and what the policy says about it."""

    batch: Sequences
    logprobs: Tensor
    """[T], or the [T, C] values or [T, H] states of an algorithm that reads these."""
    entropy: Tensor


class Bigrams(ForwardModel):
    """A model in which a token's logprob depends on it and on the one before, its values and its state on itself."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tables = [-torch.randn(50, 50, generator=generator).abs() - 0.1 for _ in range(2)]
        self.hidden = torch.randn(50, HIDDEN, generator=generator)

    def values(self, batch: Sequences) -> Tensor:
        """[T, H]"""
        return self.hidden[batch.token_ids]

    def states(self, batch: Sequences) -> Tensor:
        """[R, H] at the last tokens in the loss."""
        return self.values(batch)[last_tokens(batch)]

    def read(self, algorithm: Algorithm, batch: Sequences) -> Tensor:
        """What the algorithm reads for each token."""
        if algorithm.output not in (Output.VALUES, Output.STATES):
            return self.logprobs(batch)
        return self.values(batch)[:, : algorithm.model_outputs or HIDDEN]

    def logprobs(self, batch: Sequences, *, reference: bool = False) -> Tensor:
        """[T] nats of one of two tables; 0.0 at first tokens."""
        before = torch.cat([batch.token_ids[:1], batch.token_ids[:-1]])
        values = self.tables[reference][before, batch.token_ids]
        return values.index_fill(0, torch.cumsum(batch.lengths, 0) - batch.lengths, 0.0)


def preferences(sequences: dict[str, Tensor], kind: type[Preferences] = Preferences) -> Preferences:
    """Six pairs, one of them masked out."""
    margin = torch.zeros(len(LENGTHS))
    return kind(**sequences, pair=torch.tensor(PAIRS), chosen=torch.tensor(FIRST_IS_CHOSEN), margin=margin)


def unpaired(sequences: dict[str, Tensor]) -> Unpaired:
    """Twelve responses, a third of them desirable."""
    index = torch.arange(len(LENGTHS))
    return Unpaired(**sequences, desirable=index % 3 == 0, kl_nats=torch.zeros(len(LENGTHS)))


def labelled(sequences: dict[str, Tensor]) -> Labelled:
    """Four lists of documents, half of which are relevant; or twelve sequences of two classes."""
    return Labelled(**sequences, label=(torch.arange(len(LENGTHS)) % 2).float(), group=torch.tensor(LISTS))


def contrasted(sequences: dict[str, Tensor]) -> Contrasted:
    """Four queries, one of them masked out; the positives of two others read alike."""
    sequences["token_ids"] = sequences["token_ids"].clone()
    return Contrasted(**sequences, group=torch.tensor(LISTS), role=torch.tensor(ROLES))


KINDS: dict[str, Callable[[dict[str, Tensor]], Sequences]] = {
    "examples": lambda sequences: Sequences(**sequences),
    "preferences": preferences,
    "unpaired": unpaired,
    "labelled": labelled,
    "contrasted": contrasted,
}
"""By kind of data, the batch of the scene's sequences."""


def scene(algorithm: Algorithm, *, with_old: bool) -> Scene:
    """Twelve sequences, one of them masked out: three groups of four rollouts, one group without a signal, or what the
    algorithm's kind of data makes of them."""
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator)

    lengths = torch.tensor(LENGTHS)
    sequences = {
        "token_ids": torch.randint(0, 50, (sum(LENGTHS),), generator=generator),
        "lengths": lengths,
        "loss_mask": torch.rand(sum(LENGTHS), generator=generator) < 0.7,
    }
    sequences["loss_mask"][torch.cumsum(lengths, 0) - lengths] = False
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    sequences["loss_mask"][index == MASKED_OUT] = False
    logprobs = -noise(1.0).abs() - 0.1
    if not algorithm.online:
        assert isinstance(algorithm, OfflineAlgorithm)
        batch = algorithm.prepare(KINDS[algorithm.data](sequences), Bigrams())
        return Scene(batch, Bigrams().read(algorithm, batch), noise(1.0).abs())
    assert isinstance(algorithm, OnlineAlgorithm)
    versions = torch.zeros(len(LENGTHS), dtype=torch.int64)
    if algorithm.output is Output.DIVERGENCE:
        # Some responses that the data gave.
        versions[::3] = OFFLINE_VERSION
    # Each sequence in turns of three tokens, four states in all.
    turns = torch.cat([torch.arange(length) // 3 for length in LENGTHS])
    batch = Batch(
        **sequences,
        turns=turns.int(),
        states=(turns + torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)) % 4,
        rollout_logprobs=logprobs + noise(0.05),
        group=torch.arange(len(LENGTHS)) // GROUP_SIZE,
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.25, 2.0, 0.5, 1.0, 0.0, 0.3, 0.3, 0.3, 0.3]),
        versions=torch.repeat_interleave(versions, torch.tensor(LENGTHS)),
        reward_parts=0.5 * torch.randn(len(LENGTHS), 2, generator=torch.Generator().manual_seed(7)),
        part_weights=torch.tensor([1.0, -0.5]).expand(len(LENGTHS), -1),
        # Far enough from the policy that some tokens are clipped.
        old_logprobs=logprobs + noise(0.3) if with_old else None,
        reference_logprobs=logprobs + noise(0.5) if algorithm.needs_reference else None,
        teacher_logprobs=logprobs + noise(0.5) if algorithm.needs_teacher_logprobs else None,
    )
    if algorithm.critic:
        batch = algorithm.with_values(batch, noise(1.0)[:, None])
    return Scene(trained_on(algorithm, batch), logprobs, noise(1.0).abs())


def trained_on(algorithm: OnlineAlgorithm, batch: Batch) -> Sequences:
    """The batch as the loss gets it; the policy's entropies depend on the token."""
    made = algorithm.train_batch(batch)
    if not algorithm.needs_entropies:
        return made
    return algorithm.with_entropies(made, (made.token_ids * 0.618).frac())


def read_as(output: Output, read: Tensor, entropy: Tensor) -> PolicyOutput | ValueOutput | StateOutput:
    """What a loss is given of the model."""
    if output in (Output.TOKENS, Output.TOKENS_WITH_RENYI_ENTROPY):
        return PolicyOutput(logprobs=read, entropy=entropy, renyi_entropy=-read.detach() / 2)
    if output is Output.DIVERGENCE:
        return DivergenceOutput(logprobs=read, entropy=entropy, divergence=-read)
    return ValueOutput(values=read) if output is Output.VALUES else StateOutput(states=read)
