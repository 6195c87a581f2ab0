"""Losses of preference pairs, one function per variant, and the pairing of sequences.

Notation: r(y) = log policy(y) - log reference(y) summed over the tokens of response y in the loss, c and r the chosen
and the rejected response of a pair, D = r(c) - r(r), or another divergence's f'(e^r(c)) - f'(e^r(r)) (see
`rlframe.ops.comparisons.f_divergence`). Every loss is [N], one number per pair, without its weight.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlframe.ops.comparisons.f_divergence import FDivergence, scores
from rlframe.ops.sequences import sequence_sums, sequence_weights
from rlframe.ops.surrogate import masked_mean
from rlframe.types.batch import Sequences
from rlframe.types.results import Mean, Metric, PolicyOutput
from rlframe.types.supervised import Preferences
from rlframe.utils.errors import SettingError


class PairLoss(StrEnum):
    """Losses of DPO's family. e is the label smoothing, the probability that a label is swapped."""

    SIGMOID = "sigmoid"
    """-(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D): DPO, arXiv 2305.18290 equation 7; with e > 0 cDPO."""
    ROBUST = "robust"
    """[-(1 - e) log sigmoid(beta D) + e log sigmoid(-beta D)] / (1 - 2 e): unbiased under flips, arXiv 2403.00409."""
    HINGE = "hinge"
    """max(0, 1 - beta D): arXiv 2309.06657 (RSO), the margin of SLiC."""
    IPO_MEAN = "ipo_mean"
    """(D' - 1 / (2 beta))^2, D' of means over tokens: what TRL and AReaL call ipo."""
    IPO_SUM = "ipo_sum"
    """(D - 1 / (2 beta))^2: arXiv 2310.12036 equation 17 as printed, what OpenRLHF and ROLL call ipo."""
    EXO_PAIR = "exo_pair"
    """KL((sigmoid(beta D), sigmoid(-beta D)) || (1 - e, e)): arXiv 2402.00856 equation 16."""
    NCA_PAIR = "nca_pair"
    """-log sigmoid(beta r(c)) - (log sigmoid(-beta r(c)) + log sigmoid(-beta r(r))) / 2: arXiv 2402.05369."""
    BCO_PAIR = "bco_pair"
    """-log sigmoid(beta r(c)) - log sigmoid(-beta r(r)): arXiv 2404.04656 without its shift of the rewards."""
    SPPO_HARD = "sppo_hard"
    """(r(c) - 1 / (2 beta))^2 + (r(r) + 1 / (2 beta))^2: arXiv 2405.00675 equation 4.7, winners always winning."""
    AOT = "aot"
    """The loss of sigmoid, of the policy's margins and the reference's, each sorted over the step: arXiv 2406.05882."""
    AOT_UNPAIRED = "aot_unpaired"
    """The loss of sigmoid, of the r(c) and the r(r), each sorted over the step: arXiv 2406.05882."""
    APO_ZERO = "apo_zero"
    """1 - sigmoid(beta r(c)) + sigmoid(beta r(r)): arXiv 2408.06266 equation 7."""
    APO_DOWN = "apo_down"
    """sigmoid(beta r(c)) + 1 - sigmoid(beta (r(c) - r(r))): arXiv 2408.06266 equation 8."""
    DISCOPOP = "discopop"
    """-(1 - s) log sigmoid(beta D) + s exp(-beta D), s = sigmoid(beta D / temperature): arXiv 2406.08414 equation 5."""
    SIGMOID_NORM = "sigmoid_norm"
    """The loss of sigmoid, of means over tokens."""


SPLIT = "a pair was split"
SORTING = (PairLoss.AOT, PairLoss.AOT_UNPAIRED)
"""Losses that compare a pair with others of the step."""
UNSCORED = (
    PairLoss.NCA_PAIR,
    PairLoss.BCO_PAIR,
    PairLoss.SPPO_HARD,
    PairLoss.APO_ZERO,
    PairLoss.APO_DOWN,
    *SORTING,
)
"""Losses that read r(c) and r(r) but not D, on which another divergence has no effect; as in TRL."""
SMOOTHED = (PairLoss.SIGMOID, PairLoss.ROBUST, PairLoss.EXO_PAIR, PairLoss.SIGMOID_NORM, *SORTING)
"""Losses that label smoothing changes."""


class LikelihoodMean(StrEnum):
    """Units over which the negative log-likelihood of the chosen responses is averaged."""

    PAIRS = "pairs"
    """Mean over the tokens of each response, then over the pairs: every pair counts the same."""
    TOKENS = "tokens"
    """Mean over the tokens of all chosen responses of the step: every token counts the same, as in TRL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRatios:
    """The r(y) of N pairs, in nats."""

    chosen: Float[Tensor, " N"]
    rejected: Float[Tensor, " N"]
    chosen_tokens: Float[Tensor, " N"]
    """Number of tokens in the loss, at least 1."""
    rejected_tokens: Float[Tensor, " N"]
    """Number of tokens in the loss, at least 1."""
    chosen_matched: Float[Tensor, " N"] | None = None
    """`Preferences.matched` of the chosen responses, for a loss of SORTING."""
    rejected_matched: Float[Tensor, " N"] | None = None
    """`Preferences.matched` of the rejected responses, for a loss of SORTING."""
    divergence: FDivergence = FDivergence.REVERSE_KL
    """Divergence that turns log-ratios into the scores of D and D'."""
    alpha: float = 0.5
    """The alpha of FDivergence.ALPHA."""

    @property
    def difference(self) -> Float[Tensor, " N"]:
        """The difference D of the scores."""
        chosen, rejected = self._scores()
        return chosen - rejected

    @property
    def difference_of_means(self) -> Float[Tensor, " N"]:
        """The difference D' of the means over tokens."""
        chosen, rejected = self._scores()
        return chosen / self.chosen_tokens - rejected / self.rejected_tokens

    def _scores(self) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        chosen, rejected = (scores(side, self.divergence, alpha=self.alpha) for side in (self.chosen, self.rejected))
        return chosen, rejected


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """Settings of the losses."""

    beta: float
    label_smoothing: float = 0.0
    temperature: float = 0.05
    """Temperature of the DiscoPOP loss."""


def smoothed(logits: Float[Tensor, " N"], smoothing: float) -> Float[Tensor, " N"]:
    """Returns [N] -(1 - e) log sigmoid(logit) - e log sigmoid(-logit): cross-entropy with labels of 1 - e and e."""
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def sigmoid(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.SIGMOID."""
    return smoothed(settings.beta * ratios.difference, settings.label_smoothing)


def robust(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.ROBUST."""
    logits, e = settings.beta * ratios.difference, settings.label_smoothing
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def hinge(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.HINGE."""
    return torch.relu(1 - settings.beta * ratios.difference)


def ipo_mean(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.IPO_MEAN."""
    return (ratios.difference_of_means - 1 / (2 * settings.beta)).square()


def ipo_sum(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.IPO_SUM."""
    return (ratios.difference - 1 / (2 * settings.beta)).square()


def exo_pair(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.EXO_PAIR."""
    logits, e = settings.beta * ratios.difference, torch.tensor(settings.label_smoothing)
    chosen = torch.sigmoid(logits) * (logsigmoid(logits) - torch.log1p(-e))
    return chosen + torch.sigmoid(-logits) * (logsigmoid(-logits) - torch.log(e))


def nca_pair(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.NCA_PAIR."""
    chosen, rejected = settings.beta * ratios.chosen, settings.beta * ratios.rejected
    return -logsigmoid(chosen) - (logsigmoid(-chosen) + logsigmoid(-rejected)) / 2


def bco_pair(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.BCO_PAIR."""
    return -logsigmoid(settings.beta * ratios.chosen) - logsigmoid(-settings.beta * ratios.rejected)


def sppo_hard(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.SPPO_HARD."""
    target = 1 / (2 * settings.beta)
    return (ratios.chosen - target).square() + (ratios.rejected + target).square()


def aot(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """Returns the loss of PairLoss.AOT. `chosen_matched` holds the margin of the reference that a pair is compared
    with."""
    assert ratios.chosen_matched is not None
    margins = ratios.chosen - ratios.rejected
    return smoothed(settings.beta * (margins - ratios.chosen_matched), settings.label_smoothing)


def aot_unpaired(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """Returns the loss of PairLoss.AOT_UNPAIRED. `matched` holds the r(y) that each response is compared with, a
    constant.

    The loss of a chosen response and its match depends on both. Its value is counted with the chosen one. The gradient
    for the rejected one comes from a second term, of value 0, in which that one is the variable.
    """
    assert ratios.chosen_matched is not None and ratios.rejected_matched is not None
    chosen = smoothed(settings.beta * (ratios.chosen - ratios.chosen_matched), settings.label_smoothing)
    rejected = smoothed(settings.beta * (ratios.rejected_matched - ratios.rejected), settings.label_smoothing)
    return chosen + (rejected - rejected.detach())


def apo_zero(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.APO_ZERO."""
    return torch.sigmoid(-settings.beta * ratios.chosen) + torch.sigmoid(settings.beta * ratios.rejected)


def apo_down(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.APO_DOWN."""
    chosen, rejected = settings.beta * ratios.chosen, settings.beta * ratios.rejected
    return torch.sigmoid(chosen) + torch.sigmoid(rejected - chosen)


def discopop(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """Returns the loss of PairLoss.DISCOPOP. The product s exp(-logit) is one exponential, which cannot overflow while
    0 < tau < 1."""
    logits = settings.beta * ratios.difference
    gate = logits / settings.temperature
    return -torch.sigmoid(-gate) * logsigmoid(logits) + torch.exp(logsigmoid(gate) - logits)


def sigmoid_norm(ratios: LogRatios, settings: PairSettings) -> Float[Tensor, " N"]:
    """See PairLoss.SIGMOID_NORM."""
    return smoothed(settings.beta * ratios.difference_of_means, settings.label_smoothing)


PAIR_LOSSES: dict[PairLoss, Callable[[LogRatios, PairSettings], Tensor]] = {
    PairLoss.SIGMOID: sigmoid,
    PairLoss.ROBUST: robust,
    PairLoss.HINGE: hinge,
    PairLoss.IPO_MEAN: ipo_mean,
    PairLoss.IPO_SUM: ipo_sum,
    PairLoss.EXO_PAIR: exo_pair,
    PairLoss.NCA_PAIR: nca_pair,
    PairLoss.BCO_PAIR: bco_pair,
    PairLoss.SPPO_HARD: sppo_hard,
    PairLoss.AOT: aot,
    PairLoss.AOT_UNPAIRED: aot_unpaired,
    PairLoss.APO_ZERO: apo_zero,
    PairLoss.APO_DOWN: apo_down,
    PairLoss.DISCOPOP: discopop,
    PairLoss.SIGMOID_NORM: sigmoid_norm,
}


def log_odds_ratio(chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Returns [N] log(odds(c) / odds(r)) with odds = p / (1 - p), from mean logprobs of the responses' tokens.

    Source: Hong et al. 2024, arXiv 2403.07691, equations 3 to 5.
    """
    # The odds of a probability that rounds to 1 are infinite.
    chosen, rejected = chosen.clamp(max=-1e-6), rejected.clamp(max=-1e-6)
    return chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))


def pairs(values: Float[Tensor, " R"], batch: Preferences) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns ([N] values of the chosen sequences, [N] of the rejected ones), pair by pair. The batch must hold whole
    pairs."""
    chosen, rejected = _rows(batch)
    return values[chosen], values[rejected]


def from_pairs(chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"], batch: Preferences) -> Float[Tensor, " R"]:
    """Returns [R] the values of both sides at the positions of their sequences in the batch; the inverse of `pairs`."""
    rows = torch.cat(_rows(batch))
    return torch.cat([chosen, rejected])[torch.argsort(rows)]


def pair_weights(weights: Float[Tensor, " T"], batch: Preferences) -> Float[Tensor, " N"]:
    """Returns [N] the weight of each pair, from the weights of its tokens. 0.0 if it has none in the loss."""
    return torch.maximum(*pairs(sequence_weights(weights, batch), batch))


def pair_token_weights(batch: Preferences) -> Float[Tensor, " T"]:
    """Returns [T] 1 / N on every token in the loss, N the pairs of the optimizer step, fully masked ones included."""
    return batch.loss_mask.float() / max(batch.num_sequences // 2, 1)


def response_tokens(batch: Sequences) -> Float[Tensor, " R"]:
    """Returns [R] the number of tokens in the loss, at least 1."""
    return sequence_sums(torch.ones_like(batch.token_ids, dtype=torch.float32), batch).clamp(min=1)


def likelihood_weights(batch: Preferences, mean: LikelihoodMean) -> Float[Tensor, " R"]:
    """Returns [R] the weight in the optimizer step `batch` of the negative log-likelihood of each chosen response,
    summed over its tokens. 0.0 for rejected ones."""
    tokens = sequence_sums(torch.ones_like(batch.token_ids, dtype=torch.float32), batch) * batch.chosen
    if mean is LikelihoodMean.TOKENS:
        return batch.chosen / tokens.sum().clamp(min=1)
    return batch.chosen / (tokens.clamp(min=1) * max(batch.num_sequences // 2, 1))


def with_likelihood(batch: Preferences, coefficient: float, mean: LikelihoodMean) -> Preferences:
    """Returns the optimizer step `batch` with `likelihood_weights`, or as it is where the coefficient is 0."""
    return replace(batch, likelihood_weight=likelihood_weights(batch, mean)) if coefficient else batch


def check_likelihood(coefficient: float, mean: LikelihoodMean) -> None:
    """Raises a ValueError if likelihood_mean is set while nll_coefficient is 0."""
    if not coefficient and mean is not LikelihoodMean.PAIRS:
        hint = "remove it"
        raise SettingError("likelihood_mean", "has no effect with nll_coefficient=0", got=mean, hint=hint)


def likelihood(
    logprobs: Float[Tensor, " R"], batch: Preferences, mean: LikelihoodMean
) -> tuple[Float[Tensor, ""], Mean]:
    """Returns this micro-batch's share of the mean negative log-likelihood of the chosen responses, and the same in
    nats as a metric.

    Args:
        logprobs: the policy's logprobs, summed over the responses' tokens.
        batch: with `likelihood_weight` of the whole step.
    """
    assert batch.likelihood_weight is not None
    tokens = sequence_sums(torch.ones_like(batch.token_ids, dtype=torch.float32), batch)
    counted = batch.chosen & (tokens > 0)
    nll = torch.where(counted, -logprobs.detach(), 0.0)
    if mean is LikelihoodMean.TOKENS:
        metric = Mean(nll.sum(), torch.where(counted, tokens, 0.0).sum())
    else:
        metric = Mean((nll / tokens.clamp(min=1)).sum(), counted.sum())
    return -(batch.likelihood_weight * logprobs).sum(), metric


def length_discounts(batch: Preferences, alpha: float) -> Float[Tensor, " T"]:
    """Returns [T] alpha for the tokens of a response beyond the length of the pair's shorter response, counted in the
    loss. 1.0 before.

    Source: Liu et al. 2024, arXiv 2409.06411 (LD-DPO).
    """
    tokens = sequence_sums(torch.ones_like(batch.token_ids, dtype=torch.float32), batch)
    shared = torch.minimum(*pairs(tokens, batch))
    shared = from_pairs(shared, shared, batch)[batch.sequence_index()]
    counted = torch.cumsum(batch.loss_mask.long(), 0)
    before = (counted - batch.loss_mask.long())[torch.cumsum(batch.lengths, 0) - batch.lengths][batch.sequence_index()]
    return torch.where(counted - before > shared, alpha, 1.0)


def on_policy_weights(policy: PolicyOutput, batch: Preferences) -> Float[Tensor, " N"]:
    """Returns [N] the product over both responses of exp(mean over tokens of log p(token) - log sum_v p(v)^2), without
    gradient: the probability of the responses relative to the policy's own choices.

    Source: Zhou et al. 2024, arXiv 2406.11827 (WPO), its weights with sampled alignment.
    """
    assert policy.renyi_entropy is not None
    aligned = (policy.logprobs + policy.renyi_entropy).detach()
    chosen, rejected = pairs(sequence_sums(aligned, batch) / response_tokens(batch), batch)
    return (chosen + rejected).exp()


def matched_margins(margins: Float[Tensor, " N"], reference_margins: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Returns [N] for `aot` the amount to subtract from each D, so that the pair of the k-th smallest margin log
    policy(c) - log policy(r) is compared with the k-th smallest margin of the reference instead of its own."""
    rank = torch.argsort(torch.argsort(margins))
    return torch.sort(reference_margins).values[rank] - reference_margins


def matched_ratios(
    chosen: Float[Tensor, " N"], rejected: Float[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns [N] for `aot_unpaired` the r(r) that each r(c) is compared with, and the r(c) that each r(r) is compared
    with: those of equal rank."""
    chosen_rank, rejected_rank = (torch.argsort(torch.argsort(values)) for values in (chosen, rejected))
    return torch.sort(rejected).values[chosen_rank], torch.sort(chosen).values[rejected_rank]


def pair_metrics(
    rewards: Float[Tensor, " R"], logprobs: Float[Tensor, " R"], weights: Float[Tensor, " T"], batch: Preferences
) -> dict[str, Metric]:
    """Returns means over the pairs that count: how often and by how much the chosen response is above the rejected one.

    Args:
        logprobs: the policy's logprobs, summed over the responses' tokens.
    """
    counted = pair_weights(weights, batch) > 0
    chosen, rejected = pairs(rewards.detach(), batch)
    chosen_logprobs, rejected_logprobs = pairs(logprobs.detach(), batch)
    values = {
        "train/accuracy": (chosen > rejected).float(),
        "train/reward_margin": chosen - rejected,
        "train/chosen_reward": chosen,
        "train/rejected_reward": rejected,
        "train/chosen_logprob_nats": chosen_logprobs,
        "train/rejected_logprob_nats": rejected_logprobs,
    }
    return {key: masked_mean(value, counted) for key, value in values.items()}


def mismatched(batch: Sequences) -> Sequences:
    """Returns R sequences, each the prompt of one of the batch with the response of another: KTO's sample of pairs (x,
    y') in which y' does not answer x. Only where more than half of the batch has one prompt do some of these meet.

    The response is everything from the first token in the loss on. Hashes of the tokens decide the pairing, so that
    the estimate does not depend on the order of the batch. A response is truncated if the result would be longer than
    the batch's longest sequence, which is known to fit a forward pass.
    """
    rows = list(zip(*(part.split(batch.lengths.tolist()) for part in (batch.token_ids, batch.loss_mask)), strict=True))
    prompts = [_digest(tokens[: _first(mask)]) for tokens, mask in rows]
    order = sorted(range(len(rows)), key=lambda row: (prompts[row], _digest(rows[row][0])))
    rows = [rows[row] for row in order]
    # The rows of each prompt are neighbours: as many places on as the most frequent one has rows, there is another.
    most = max(Counter(prompts).values())
    places = most if most < len(rows) else 1
    longest = int(batch.lengths.max())
    made = []
    for (tokens, mask), (other_tokens, other_mask) in zip(rows, rows[places:] + rows[:places], strict=True):
        start, other_start = (_first(each) for each in (mask, other_mask))
        joined = torch.cat([tokens[:start], other_tokens[other_start:]])[:longest]
        counted = torch.cat([torch.zeros(start, dtype=torch.bool), other_mask[other_start:]])[:longest]
        made.append((joined, counted))
    return Sequences(
        token_ids=torch.cat([tokens for tokens, _ in made]),
        lengths=torch.tensor([len(tokens) for tokens, _ in made]),
        loss_mask=torch.cat([mask for _, mask in made]),
    )


def _rows(batch: Preferences) -> tuple[Tensor, Tensor]:
    """Returns [N] the index of the chosen sequence of each pair, and [N] that of its rejected one."""
    order = torch.argsort(batch.pair * 2 + (~batch.chosen).long())
    chosen, rejected = order[0::2], order[1::2]
    assert len(order) % 2 == 0, SPLIT
    whole = (batch.pair[chosen] == batch.pair[rejected]) & batch.chosen[chosen] & ~batch.chosen[rejected]
    # A GPU looks at it when it gets there; the host does not wait.
    torch.ops.aten._assert_async.msg(whole.all(), SPLIT)
    return chosen, rejected


def _digest(tokens: Tensor) -> bytes:
    return hashlib.sha256(tokens.numpy().tobytes()).digest()


def _first(mask: Tensor) -> int:
    """Returns the index of the first True, or the length if there is none."""
    return int(mask.int().argmax()) if mask.any() else len(mask)
