"""Faults in the policy gradients themselves."""

from tests.mutations.mutation import Mutation, faults

GRPO = "tests/unit/algorithms/test_grpo.py"
LOOP = GRPO + " tests/unit/loops/test_online_loop.py"
GRADIENTS = GRPO + " tests/unit/algorithms/test_policy_gradients.py"
REFERENCES = "tests/unit/algorithms/test_reference_losses.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/algorithms/policy_gradient.py",
        LOOP,
        (
            "the KL is added with the other sign",
            "token_loss = token_loss + self.kl_coefficient * kl",
            "token_loss = token_loss - self.kl_coefficient * kl",
        ),
        (
            "the KL has no coefficient",
            "token_loss = token_loss + self.kl_coefficient * kl",
            "token_loss = token_loss + kl",
        ),
        (
            "bypass compares with the trainer",
            "old_logprobs = batch.rollout_logprobs if self.bypass else trainer_logprobs",
            "old_logprobs = trainer_logprobs",
        ),
        (
            "the engine's logprobs are always the old ones",
            "old_logprobs = batch.rollout_logprobs if self.bypass else trainer_logprobs",
            "old_logprobs = batch.rollout_logprobs",
        ),
        (
            "the old policy is the present one",
            "present if self.bypass or batch.old_logprobs is None else batch.old_logprobs",
            "present",
        ),
        (
            "the reference is the old policy",
            "policy.logprobs,\n                batch.reference_logprobs,",
            "policy.logprobs,\n                trainer_logprobs,",
        ),
        (
            "advantages are of the tokens outside the loss too",
            "batch.lengths) * batch.loss_mask",
            "batch.lengths) * 1.0",
        ),
    ),
    *faults(
        "rlframe/algorithms/policy_gradient.py",
        GRADIENTS,
        (
            "entropy is punished",
            "token_loss = token_loss - config.entropy_coefficient * policy.entropy",
            "token_loss = token_loss + config.entropy_coefficient * policy.entropy",
        ),
        (
            "the KL in the reward is a gain",
            "return rewards_by_sequence(batch) - attempt_sums(self.kl_penalty(batch), batch)",
            "return rewards_by_sequence(batch) + attempt_sums(self.kl_penalty(batch), batch)",
        ),
        ("the KL is in reward and loss", "if not config.kl_in_reward:", "if True:"),
        ("the correction is forgotten", "token_loss = token_loss * correction.factor", "token_loss = token_loss * 1.0"),
    ),
    *faults(
        "rlframe/algorithms/policy_gradient.py",
        "tests/unit/algorithms/test_distillation.py",
        (
            "the teacher pushes away",
            "train_batch.advantages - self.config.distillation_coefficient * gap",
            "train_batch.advantages + self.config.distillation_coefficient * gap",
        ),
        (
            "the teacher speaks of prompts too",
            "gap = torch.where(batch.loss_mask, sampled_logprobs(batch) - batch.teacher_logprobs, 0.0)",
            "gap = sampled_logprobs(batch) - batch.teacher_logprobs",
        ),
    ),
    *faults(
        "rlframe/ops/surrogate.py",
        GRADIENTS,
        (
            "gspo: the gradient goes through the mean",
            "return sequence_means((logprobs - old_logprobs).detach(), batch) + logprobs - logprobs.detach()",
            "return sequence_means(logprobs - old_logprobs, batch)",
        ),
        (
            "gspo: the token's own ratio",
            "return sequence_means((logprobs - old_logprobs).detach(), batch) + logprobs - logprobs.detach()",
            "return logprobs - old_logprobs",
        ),
    ),
    *faults(
        "rlframe/algorithms/gspo.py",
        GRADIENTS,
        ("gspo: clips like ppo", "clip_low=config.clip_low,", "clip_low=0.2,"),
    ),
    *faults(
        "rlframe/algorithms/rloo.py",
        REFERENCES,
        (
            "rloo: the group's mean",
            "advantages = leave_one_out_advantages(rewards, group)",
            "advantages = leave_one_out_advantages(rewards, group) / 2",
        ),
    ),
    *faults(
        "rlframe/algorithms/reinforce_plus_plus.py",
        "tests/unit/algorithms/test_policy_gradients.py " + REFERENCES,
        (
            "reinforce++: returns are not whitened",
            "return whiten(discounted_returns(rewards, batch, discount=self.config.discount), batch.loss_mask)",
            "return discounted_returns(rewards, batch, discount=self.config.discount)",
        ),
        (
            "reinforce++: the penalty is a gain",
            "rewards_by_token(batch) - penalty",
            "rewards_by_token(batch) + penalty",
        ),
        ("reinforce++: the discount is 1", "discount=self.config.discount)", "discount=1.0)"),
    ),
    *faults(
        "rlframe/algorithms/ppo.py",
        "tests/unit/algorithms/test_ppo.py",
        ("ppo: returns without the value", "advantages + before, 0.0))", "advantages, 0.0))"),
        (
            "ppo: the penalty is a gain",
            "rewards_by_token(batch) - self.kl_penalty(batch)",
            "rewards_by_token(batch) + self.kl_penalty(batch)",
        ),
        ("ppo: a cut rollout earns nothing though asked", "if config.bootstrap_truncated:", "if False:"),
        (
            "ppo: every rollout is taken for cut",
            "torch.where(batch.truncated, after_sequences(after, batch), 0.0)",
            "after_sequences(after, batch)",
        ),
        ("ppo: never whitened", "if self.config.whiten_advantages else advantages", "if False else advantages"),
        ("ppo: lambda is 1", "gae_lambda=config.gae_lambda,", "gae_lambda=1.0,"),
    ),
    *faults(
        "rlframe/ops/advantages.py",
        "tests/unit/algorithms/test_attempts_of_several_sequences.py",
        (
            "later sequences of an attempt earn nothing for earlier ones",
            "last_token_rewards(batch.rewards + later_rewards(batch), batch)",
            "last_token_rewards(batch.rewards, batch)",
        ),
        (
            "a sequence's own rewards count twice",
            "later.append(earned[attempt])",
            "later.append(earned[attempt] + reward)",
        ),
    ),
    *faults(
        "rlframe/algorithms/critic.py",
        "tests/unit/algorithms/test_ppo.py",
        (
            "critic: values after the token",
            "values = before_tokens(critic.values[:, 0], batch)",
            "values = critic.values[:, 0]",
        ),
        ("critic: never clips", "clip=self.clip)\n        loss", "clip=None)\n        loss"),
    ),
    *faults(
        "rlframe/algorithms/dynamic_sampling.py",
        "tests/unit/loops/sampling/test_buffered.py",
        ("dynamic sampling keeps what has no signal", "return None\n    if", "return None\n    return None\n    if"),
    ),
]
