"""Faults in what policy gradients are made of: advantages, ratios, KL, corrections, generalized advantages."""

from tests.mutations.mutation import Mutation, faults

ADVANTAGES = "tests/unit/ops/test_advantages.py"
REWARDS_TO_ADVANTAGES = "tests/unit/algorithms/test_rewards_to_advantages.py"
SURROGATE = "tests/unit/ops/test_surrogate.py"
CORRECTION = "tests/unit/algorithms/test_correction.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/algorithms/correction.py",
        "tests/unit/run/check/test_check_lag.py",
        ("runs without a lag are warned", "if facts.max_policy_lag and (reason", "if (reason"),
        (
            "a weight needs no cap",
            "or config.weight_cap is not None:\n        return",
            "or config.weight is not RatioOf.NONE:\n        return",
        ),
        ("every surrogate is bounded", "if not bounds_ratio and", "if False and"),
        ("bypass bounds nothing", "if config.bypass or not facts.one_update:", "if not facts.one_update:"),
    ),
    *faults(
        "rlframe/ops/advantages.py",
        ADVANTAGES,
        ("group: the mean is not taken off", "0.0, rewards - means[group])", "0.0, rewards)"),
        (
            "group: the biased deviation",
            "index_add_(0, group, centred.square()) / (counts - 1).clamp(min=1)",
            "index_add_(0, group, centred.square()) / counts",
        ),
        (
            "group: the variance in place of the deviation",
            "return centred / (variances.sqrt()[group] + eps)",
            "return centred / (variances[group] + eps)",
        ),
        (
            "group: one mean for all groups",
            "torch.zeros_like(counts).index_add_(0, group, rewards) / counts",
            "torch.zeros_like(counts) + rewards.mean()",
        ),
        ("group: rounding becomes a signal", "(lowest == highest)[group]", "(lowest > highest)[group]"),
        ("leave one out: the rollout is in its own baseline", "* counts / (counts - 1).clamp(min=1)", "* 1.0"),
        (
            "the reward comes at the first token",
            'scatter_reduce_(0, sequence, places, "amax")',
            'scatter_reduce_(0, sequence, places.where(places >= 0, 10**9), "amin", include_self=False)',
        ),
        (
            "returns: no discount",
            "columns[place] += discount * columns[place - 1]",
            "columns[place] += columns[place - 1]",
        ),
        ("returns: the wrong way round", "to_go = counts[sequence] - 1 - rank", "to_go = rank"),
        ("whiten: the mean stays", "centred = chosen - chosen.mean()", "centred = chosen"),
        (
            "whiten: the biased variance",
            "centred.square().sum() / (chosen.numel() - 1)",
            "centred.square().sum() / chosen.numel()",
        ),
        (
            "whiten: masked tokens count",
            "chosen = values[mask]\n    if chosen.numel() == 0",
            "chosen = values\n    if chosen.numel() == 0",
        ),
    ),
    *faults(
        "rlframe/ops/advantages.py",
        REWARDS_TO_ADVANTAGES,
        (
            "batch: deviation of what is centred",
            "return centred / (deviation(rewards) + eps)",
            "return centred / (deviation(centred) + eps)",
        ),
        ("parts: weights are forgotten", "total[said] += weight[said] * advantages", "total[said] += advantages"),
        ("parts: not normalised together", "return total / (deviation(total) + eps)", "return total"),
    ),
    *faults(
        "rlframe/ops/surrogate.py",
        SURROGATE,
        (
            "clip: only above",
            "-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages\n    loss, where",
            "-ratio.clamp(max=1 + clip_high) * advantages\n    loss, where",
        ),
        (
            "clip: only below",
            "-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages\n    loss, where",
            "-ratio.clamp(min=1 - clip_low) * advantages\n    loss, where",
        ),
        (
            "clip: the bounds change places",
            "-ratio.clamp(1 - clip_low, 1 + clip_high) * advantages\n    loss, where",
            "-ratio.clamp(1 - clip_high, 1 + clip_low) * advantages\n    loss, where",
        ),
        (
            "clip: the optimistic of the two",
            "loss, where = torch.maximum(plain, clipped), clipped > plain",
            "loss, where = torch.minimum(plain, clipped), clipped > plain",
        ),
        (
            "clip: the fraction counts what was not clipped",
            "torch.maximum(plain, clipped), clipped > plain\n    if",
            "torch.maximum(plain, clipped), clipped <= plain\n    if",
        ),
        ("dual clip: also of good tokens", "beyond = (advantages < 0) & (loss > most)", "beyond = loss > most"),
        (
            "cispo: the weight takes a gradient",
            "ratio = (logprobs - old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()\n    weight",
            "ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()\n    weight",
        ),
        (
            "cispo: no logprob",
            "return -weight * advantages * logprobs, weight != ratio",
            "return -weight * advantages, weight != ratio",
        ),
        (
            "sapo: temperatures change places",
            "torch.where(advantages > 0, temperature_positive, temperature_negative)",
            "torch.where(advantages > 0, temperature_negative, temperature_positive)",
        ),
        ("sapo: the slope at 1 is not 1", "return -4 / tau * gate * advantages", "return -gate * advantages"),
        (
            "sequence mean: over all tokens",
            "counts = values.new_zeros(batch.num_sequences).index_add(0, sequence, batch.loss_mask.to(values.dtype))",
            "counts = batch.lengths.to(values.dtype)",
        ),
        (
            "sequence mean: masked tokens take part",
            "torch.where(batch.loss_mask, values, 0.0))\n    counts",
            "values)\n    counts",
        ),
        ("a metric's mean over all tokens", "0.0).sum(), mask.sum())", "0.0).sum(), mask.numel())"),
    ),
    *faults(
        "rlframe/ops/kl.py",
        "tests/unit/ops/test_kl.py",
        ("k1 has the other sign", "return d\n", "return -d\n"),
        ("k2 without its half", "return d.square() / 2\n    # Both", "return d.square()\n    # Both"),
        ("k3 of the reverse ratio", "k3 = (-clamped).exp() + clamped - 1", "k3 = clamped.exp() - clamped - 1"),
        ("k3 without its linear term", "k3 = (-clamped).exp() + clamped - 1", "k3 = (-clamped).exp() - 1"),
        (
            "k3 is capped where nobody asked",
            "if cap is not None:\n        k3",
            "if True:\n        cap = cap or 10\n        k3",
        ),
        ("k3's cap does nothing", "k3 = k3.clamp(max=cap)", "k3 = k3"),
        ("k3_plus has the gradient of k3", "return k2 - k2.detach() + k3.detach()", "return k3"),
        (
            "k3_weighted without the weight",
            "return k3 * (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()",
            "return k3",
        ),
        (
            "the adaptive coefficient moves the wrong way",
            "return coefficient * (1 + gain * error)",
            "return coefficient * (1 - gain * error)",
        ),
        ("the adaptive coefficient's error is not bounded", "min(max(kl / target - 1, -0.2), 0.2)", "kl / target - 1"),
    ),
    *faults(
        "rlframe/ops/gae.py",
        "tests/unit/ops/test_gae.py",
        (
            "gae: the value of the present state is not taken off",
            "discount * following - present)",
            "discount * following)",
        ),
        ("gae: no discount of the next state", "rewards[mask] + discount * following", "rewards[mask] + following"),
        ("gae: lambda is forgotten", "discount=discount * gae_lambda)", "discount=discount)"),
        (
            "gae: values leak over the end of a sequence",
            "following = torch.where(last, final_values[sequence], ",
            "following = torch.where(last & False, final_values[sequence], ",
        ),
        (
            "gae: a final value for every sequence is 0",
            "final_values[sequence], pad(",
            "0.0 * final_values[sequence], pad(",
        ),
        (
            "values are those after the token",
            "return pad(after, (1, 0))[:-1].index_fill(0, starts, 0.0)",
            "return after.index_fill(0, starts, 0.0)",
        ),
        (
            "value loss: the smaller of the two",
            "return torch.maximum(plain, near) / 2, near > plain",
            "return torch.minimum(plain, near) / 2, near > plain",
        ),
        ("value loss: without its half", "return plain / 2, torch", "return plain, torch"),
        ("explained variance: of the values", "known.var(correction=0))", "known.var(correction=0) / 2)"),
    ),
    *faults(
        "rlframe/ops/correction.py",
        CORRECTION,
        ("geometric mean: the product", "if of is RatioOf.SEQ_GEO:", "if False:"),
        (
            "token ratio outside the loss",
            "inside = torch.where(batch.loss_mask, log_ratio, 0.0)\n    if of",
            "inside = log_ratio\n    if of",
        ),
        ("a mask's lower bound is not looked at", "kept &= ratio >= low", "kept &= ratio >= 0"),
        ("a mask's upper bound is not looked at", "kept &= ratio <= high", "kept &= ratio >= 0"),
        ("k3 of the reverse KL", "d.expm1() - d\n    if scope", "(-d).expm1() + d\n    if scope"),
        ("stray: of good tokens", "return (advantages < 0) &", "return (advantages >= 0) &"),
        (
            "stray: the other way",
            "sequence_means(-log_ratio, batch) > limit_nats",
            "sequence_means(log_ratio, batch) > limit_nats",
        ),
    ),
    *faults(
        "rlframe/ops/correction.py",
        "tests/unit/algorithms/test_grpo.py",
        ("the gap's k1 has the other sign", "MeanIfAny(-d.sum(), count)", "MeanIfAny(d.sum(), count)"),
    ),
    *faults(
        "rlframe/algorithms/correction.py",
        CORRECTION,
        (
            "the cap is not applied",
            "weights = weights.clamp(min=config.weight_floor, max=config.weight_cap)",
            "weights = weights.clamp(min=config.weight_floor)",
        ),
        (
            "the floor is not applied",
            "weights = weights.clamp(min=config.weight_floor, max=config.weight_cap)",
            "weights = weights.clamp(max=config.weight_cap)",
        ),
        ("only the last mask counts", "kept &= within(", "kept = within("),
        (
            "the ratio is engine over trainer",
            "log_ratio = trainer_logprobs - batch.rollout_logprobs",
            "log_ratio = batch.rollout_logprobs - trainer_logprobs",
        ),
        ("masked tokens keep their weight", "factor = weights * kept", "factor = weights"),
    ),
]
