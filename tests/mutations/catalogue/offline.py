"""Faults in preferences, distillation, supervised losses, scores and embeddings."""

from tests.mutations.mutation import Mutation, faults

PREFERENCE = "tests/unit/algorithms/offline/test_preference.py"
SUPERVISED = "tests/unit/algorithms/offline/test_sft.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/ops/comparisons/preference.py",
        PREFERENCE,
        ("pairs change places", "return values[chosen], values[rejected]", "return values[rejected], values[chosen]"),
        (
            "label smoothing is forgotten",
            "return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)",
            "return -logsigmoid(logits)",
        ),
        (
            "sigmoid: no beta",
            "return smoothed(settings.beta * ratios.difference, settings.label_smoothing)",
            "return smoothed(ratios.difference, settings.label_smoothing)",
        ),
        ("robust: not divided", "+ e * logsigmoid(-logits)) / (1 - 2 * e)", "+ e * logsigmoid(-logits))"),
        (
            "hinge: no margin",
            "torch.relu(1 - settings.beta * ratios.difference)",
            "torch.relu(-settings.beta * ratios.difference)",
        ),
        (
            "ipo_mean: of sums",
            "return (ratios.difference_of_means - 1 / (2 * settings.beta)).square()",
            "return (ratios.difference - 1 / (2 * settings.beta)).square()",
        ),
        (
            "ipo_sum: beta where 1 / 2 beta belongs",
            "return (ratios.difference - 1 / (2 * settings.beta)).square()",
            "return (ratios.difference - settings.beta).square()",
        ),
        ("exo: without the entropy of the labels", "(logsigmoid(logits) - torch.log1p(-e))", "logsigmoid(logits)"),
        (
            "nca: no half",
            "(logsigmoid(-chosen) + logsigmoid(-rejected)) / 2",
            "(logsigmoid(-chosen) + logsigmoid(-rejected))",
        ),
        (
            "bco: the rejected one is pushed up",
            "- logsigmoid(-settings.beta * ratios.rejected)",
            "- logsigmoid(settings.beta * ratios.rejected)",
        ),
        ("sppo: one target for both", "(ratios.rejected + target).square()", "(ratios.rejected - target).square()"),
        (
            "apo_zero: both up",
            "+ torch.sigmoid(settings.beta * ratios.rejected)",
            "+ torch.sigmoid(-settings.beta * ratios.rejected)",
        ),
        (
            "apo_down: the chosen one up",
            "return torch.sigmoid(chosen) + torch.sigmoid(rejected",
            "return torch.sigmoid(-chosen) + torch.sigmoid(rejected",
        ),
        ("discopop: no temperature", "gate = logits / settings.temperature", "gate = logits"),
        (
            "pairs are counted twice",
            "batch.loss_mask.float() / max(batch.num_sequences // 2, 1)",
            "batch.loss_mask.float() / max(batch.num_sequences, 1)",
        ),
        ("odds: probabilities", "- torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))", ""),
    ),
    *faults(
        "rlframe/ops/comparisons/preference.py",
        "tests/unit/algorithms/offline/test_kto.py",
        ("mismatched: everybody keeps the own response", "rows[places:] + rows[:places]", "rows"),
        (
            "mismatched: the prompt counts",
            "torch.zeros(start, dtype=torch.bool), other_mask",
            "torch.ones(start, dtype=torch.bool), other_mask",
        ),
    ),
    *faults(
        "rlframe/algorithms/dpo.py",
        PREFERENCE,
        (
            "dpo: no reference",
            "self._sums(policy.logprobs, batch) - self._sums(batch.reference_logprobs, batch)",
            "self._sums(policy.logprobs, batch)",
        ),
        (
            "dpo: the likelihood is unlearnt",
            "loss = loss + config.rpo_alpha * nll",
            "loss = loss - config.rpo_alpha * nll",
        ),
        (
            "dpo: mixed losses weigh alike",
            "weight * preference.PAIR_LOSSES[name](of_pairs, settings)",
            "preference.PAIR_LOSSES[name](of_pairs, settings)",
        ),
    ),
    *faults(
        "rlframe/algorithms/kto.py",
        "tests/unit/algorithms/offline/test_kto.py",
        ("kto: no KL", "distance = config.beta * (ratios - batch.kl_nats)", "distance = config.beta * ratios"),
        ("kto: the KL may be below 0", "ratios.mean().clamp(min=0)", "ratios.mean()"),
        (
            "kto: weights change places",
            "config.desirable_weight * torch.sigmoid(-distance),",
            "config.undesirable_weight * torch.sigmoid(-distance),",
        ),
        (
            "kto: undesirable ones are pushed up",
            "config.undesirable_weight * torch.sigmoid(distance),",
            "config.undesirable_weight * torch.sigmoid(-distance),",
        ),
        (
            "kto: the reference is live where it should be frozen",
            "reference_logprobs=model.logprobs(batch, reference=True)",
            "reference_logprobs=model.logprobs(batch)",
        ),
    ),
    *faults(
        "rlframe/algorithms/simpo.py",
        PREFERENCE,
        ("simpo: sums", "rewards = logprobs / preference.response_tokens(batch)", "rewards = logprobs"),
        ("simpo: the margin on the wrong side", "chosen - rejected - config.gamma", "chosen - rejected + config.gamma"),
    ),
    *faults(
        "rlframe/algorithms/orpo.py",
        PREFERENCE,
        ("orpo: odds push the wrong way", "loss = nll - (weight", "loss = nll + (weight"),
        ("orpo: sums", "means = logprobs / preference.response_tokens(batch)", "means = logprobs"),
    ),
    *faults(
        "rlframe/algorithms/reward_model.py",
        "tests/unit/algorithms/offline/test_scores.py",
        (
            "reward model: the wrong way round",
            "softplus(margin - (chosen - rejected))",
            "softplus(margin - (rejected - chosen))",
        ),
        (
            "reward model: the margin is a gift",
            "softplus(margin - (chosen - rejected))",
            "softplus(-margin - (chosen - rejected))",
        ),
        (
            "reward model: centring of the difference",
            "config.centring * (chosen + rejected).square()",
            "config.centring * (chosen - rejected).square()",
        ),
    ),
    *faults(
        "rlframe/algorithms/sft.py",
        SUPERVISED,
        ("sft: unlearns", "token_loss = -policy.logprobs\n", "token_loss = policy.logprobs\n"),
        ("dft: the probability takes a gradient", "policy.logprobs.detach().exp()", "policy.logprobs.exp()"),
        ("sft: importance is forgotten", "importance=importance)", "importance=None)"),
    ),
    *faults(
        "rlframe/algorithms/gkd.py",
        "tests/unit/algorithms/test_distillation.py",
        (
            "gkd: given tokens are unlearnt",
            "token_loss - self.config.nll_coefficient * policy.logprobs * given",
            "token_loss + self.config.nll_coefficient * policy.logprobs * given",
        ),
        ("gkd: sampled tokens count as given", "policy.logprobs * given", "policy.logprobs"),
        ("gkd: every step is the student's", "/ 2**64 < self.config.on_policy_fraction", "/ 2**64 < 1"),
    ),
    *faults(
        "rlframe/ops/aggregation.py",
        "tests/unit/ops/test_aggregation.py",
        ("token mean: over all tokens", "return mask / divisor(mask.sum())", "return mask / batch.num_tokens"),
        ("sequence sum: over tokens", "return mask / batch.num_sequences", "return mask / divisor(mask.sum())"),
        (
            "constant length: 1",
            "return mask / (batch.num_sequences * constant_length)",
            "return mask / batch.num_sequences",
        ),
        (
            "sequence mean: long ones count more",
            "return mask / (count_by(sequence, mask) * batch.num_sequences)",
            "return mask / divisor(mask.sum())",
        ),
        (
            "prompt mean: of sequences",
            "count_by(prompt_of_sequence[sequence], mask) * len(prompts)",
            "count_by(sequence, mask) * len(prompts)",
        ),
        (
            "importance is in the numerator only",
            "return divisor(torch.zeros(size).index_add_(0, index, mask))[index]",
            "return divisor(torch.zeros(size).index_add_(0, index, (mask > 0).float()))[index]",
        ),
    ),
    *faults(
        "rlframe/ops/sequences.py",
        PREFERENCE,
        ("a sequence's sum is of all its tokens", "masked = values.where(batch.loss_mask, 0.0)", "masked = values"),
    ),
    *faults(
        "rlframe/ops/sequences.py",
        "tests/unit/ops/test_sequences.py",
        ("the last output is the pack's", "return last.where(last >= 0, ends)", "return ends"),
    ),
    *faults(
        "rlframe/ops/comparisons/contrast.py",
        "tests/unit/algorithms/offline/test_embedding.py",
        ("infonce: no temperature", "(near / temperature)", "(near * 1.0)"),
        ("infonce: dot products for cosines", "if cosine:", "if False:"),
        (
            "infonce: equal texts are negatives",
            "== 0\n    chosen_from.fill_diagonal_(True)",
            "< 10**9\n    chosen_from.fill_diagonal_(True)",
        ),
        ("infonce: only the last width", "losses = losses + cross_entropy", "losses = cross_entropy"),
    ),
    *faults(
        "rlframe/ops/comparisons/ranking.py",
        "tests/unit/algorithms/offline/test_scores.py",
        (
            "a list's softmax is the step's",
            "groups, index = torch.unique(group, return_inverse=True)\n    empty",
            "groups, index = torch.unique(group * 0, return_inverse=True)\n    empty",
        ),
    ),
]
