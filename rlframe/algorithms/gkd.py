"""Generalised knowledge distillation.

Source: Agarwal et al. 2024, arXiv 2306.13649, algorithm 1 and equation 1: the divergence between student and teacher at
each token of a response, which the student sampled itself in a fraction lambda of the steps, and which the data or the
teacher gave in the others. TRL draws that choice anew in every process and run; here a hash of seed and step decides,
so that a resumed run repeats it. The divergence is computed by the ranks (`Output.DIVERGENCE`); the loss weighs it.

TRL's temperature is 0.9 by default and also that of sampling. ms-swift pads a teacher of another vocabulary size, which
config.check refuses here; losses across tokenizers (TRL's GOLD) and verl's estimators k1 to k3 in the place of a
divergence are not offered: `on_policy_distillation` is k1, as an advantage.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rlframe.algorithms.base import OfflineAlgorithm, OnlineAlgorithm
from rlframe.algorithms.requirements import GivenResponses, Requirements, Writer
from rlframe.ops.aggregation import Aggregation, token_weights
from rlframe.ops.correction import engine_gap
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import Batch, Sequences
from rlframe.types.results import Divergence, DivergenceOutput, LossOutput, MeanIfAny, Metric, Output, Rest, Sum
from rlframe.types.rollout import OFFLINE_VERSION
from rlframe.types.supervised import Examples
from rlframe.utils.bounds import Range, check_bounds
from rlframe.utils.errors import SettingError


@dataclass(kw_only=True, slots=True)
class GkdConfig:
    """GKD's settings."""

    name: str = "gkd"
    """Name of the algorithm."""
    beta: Annotated[float, Range(0, 1)] = 0.5
    """Interpolation of the divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them is the
    generalised Jensen-Shannon divergence."""
    on_policy_fraction: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the steps in which the student samples the responses (the paper's lambda, `lmbda` elsewhere). In the
    others they are the data's, or the teacher's (seq_kd). 0 with the data's responses needs no engine."""
    temperature: Annotated[float, Range(above=0, maximum=1e4)] = 1.0
    """Divisor of both models' logits in the divergence. Responses are sampled at rollout.temperature."""
    top_k: Annotated[int, Range(0, 10**6, note="0: the whole vocabulary")] = 0
    """Number k of the teacher's most likely tokens over which the models are compared, so that k + 1 numbers of the
    teacher per token suffice. 0 means the whole vocabulary, which needs the teacher's logits on the student's ranks."""
    rest: Rest = Rest.ONE_OUTCOME
    """Treatment of all other tokens with top_k."""
    divergence_cap: Annotated[float, Range(above=0, maximum=1e4)] | None = None
    """Greatest value of a token's divergence in nats, beyond which it has no gradient (verl's loss_max_clamp, 10
    there). With rest=left_out, where the divergence can be negative, minus this is the lower bound. null means no
    bound."""
    nll_coefficient: Annotated[float, Range(0, 1e4)] = 0.0
    """Weight of the negative log-likelihood of responses that the student did not sample, called `sft_alpha` in
    ms-swift."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """Rule by which token losses become one number."""
    seq_kd: bool = False
    """Whether the teacher writes the responses that the student does not (sequence-level distillation), in engines of
    its own (teacher.engine). Prompts then suffice as data."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.top_k and self.rest is not Rest.ONE_OUTCOME:
            raise SettingError("rest", "has no effect with top_k=0", got=self.rest, hint="remove it, or set top_k")
        if self.nll_coefficient and self.on_policy_fraction == 1:
            raise SettingError(
                "nll_coefficient",
                "has no effect with on_policy_fraction=1, where the student samples every response",
                got=self.nll_coefficient,
                hint="remove it",
            )
        if self.aggregation in (Aggregation.PROMPT_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM_NORM):
            raise SettingError(
                "aggregation", f"{self.aggregation} is for groups of rollouts, not for gkd", hint="use token_mean"
            )
        if self.seq_kd and self.on_policy_fraction == 1:
            raise SettingError(
                "seq_kd",
                "has no effect with on_policy_fraction=1, where the student samples every response",
                got="true",
                hint="remove it",
            )


class Gkd(OnlineAlgorithm, OfflineAlgorithm):
    """Divergence from the teacher on the student's and given responses. Online unless all responses are the data's."""

    output = Output.DIVERGENCE
    needs_rewards = False
    needs_old_logprobs = False

    def __init__(self, config: GkdConfig):
        self.config = config
        self.online = config.on_policy_fraction > 0 or config.seq_kd
        self.needs_responses = config.on_policy_fraction < 1 and not config.seq_kd
        self.divergence = Divergence(
            beta=config.beta, temperature=config.temperature, top_k=config.top_k, rest=config.rest
        )

    @property
    def requirements(self) -> Requirements:
        """Returns the algorithm's requirements."""
        sampling = None
        if self.needs_responses or self.config.seq_kd:
            writer = Writer.TEACHER if self.config.seq_kd else Writer.DATA
            sampling = GivenResponses(writer=writer, samples=self.samples)
        return replace(
            super().requirements,
            sampling=sampling,
            samples_policy=self.config.on_policy_fraction > 0,
            nll_coefficient=self.config.nll_coefficient,
        )

    def samples(self, seed: int, step: int) -> bool:
        """Returns whether the student samples the responses of step `step`."""
        digest = hashlib.sha256(f"gkd:{seed}:{step}".encode()).digest()
        return int.from_bytes(digest[:8]) / 2**64 < self.config.on_policy_fraction

    def token_weights(self, batch: Sequences) -> Float[Tensor, " T"]:
        """Returns [T] the weights by `aggregation`. Tokens are weighted by their importance if the data gives one."""
        importance = batch.importance if isinstance(batch, Examples) else None
        return token_weights(batch, self.config.aggregation, importance=importance)

    def advantages(self, batch: Batch) -> Float[Tensor, " T"]:
        """Returns [T] zeros: there is no reward, and the loss reads none."""
        return torch.zeros(batch.num_tokens)

    def loss(self, policy: DivergenceOutput, batch: Sequences, weights: Float[Tensor, " T"]) -> LossOutput:
        """Returns the sum of weights * (divergence - nll_coefficient * logprob of the data's tokens)."""
        mask, given = batch.loss_mask, given_tokens(batch)
        token_loss = policy.divergence
        if (cap := self.config.divergence_cap) is not None:
            token_loss = token_loss.clamp(-cap, cap)
        metrics: dict[str, Metric] = {
            "train/divergence_nats": masked_mean(policy.divergence, mask),
            "train/entropy_nats": masked_mean(policy.entropy, mask),
            "train/nll_nats": masked_mean(-policy.logprobs, mask & given, MeanIfAny),
        }
        if self.config.nll_coefficient:
            token_loss = token_loss - self.config.nll_coefficient * policy.logprobs * given
        if isinstance(batch, Batch):
            metrics |= engine_gap(policy.logprobs.detach() - batch.rollout_logprobs, mask & ~given)
        loss = (weights * token_loss).sum()
        metrics["train/loss"] = Sum(loss.detach())
        return LossOutput(loss=loss, metrics=metrics)


def given_tokens(batch: Sequences) -> Bool[Tensor, " T"]:
    """Returns [T] True for tokens that no policy sampled. Among those in the loss, they come from the data or the
    teacher."""
    if not isinstance(batch, Batch):
        return torch.ones_like(batch.loss_mask)
    return batch.versions == OFFLINE_VERSION


COMPONENT, CONFIG = Gkd, GkdConfig
