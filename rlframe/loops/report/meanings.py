"""Meanings of the metrics that matter most, in the order in which a person should look at them."""

MEANINGS = {
    "reward/mean": "Mean reward of the attempts of a step. It should rise.",
    "evaluation/reward_mean": "Mean reward of greedy answers to held-out prompts. What was learned, not memorised.",
    "train/loss": "What the optimizer minimises. With policy gradients it hovers around 0 and says little.",
    "evaluation/loss": "The loss on held-out items. If it rises while the training loss falls, the model memorises.",
    "train/accuracy": "Share of comparisons that the model gets right.",
    "train/entropy_nats": "How undecided the policy is at each token. Near 0 it no longer explores.",
    "train/kl_nats": "How far the policy has moved from the reference, per token.",
    "rollout/logprob_gap_mean_nats": "Mean difference between the trainer's and the engine's log-probability of the "
    "same token. It should stay small and flat; if it grows, the engines sample from another model than is trained. In "
    "asynchronous runs it is also the age of their weights.",
    "rollout/logprob_gap_max_nats": "Greatest difference between trainer and engine at any token.",
    "rollout/response_tokens_mean": "Mean length of a response. A sudden rise is often a way to game the reward.",
    "rollout/truncated_fraction": "Share of responses that were cut off at the token limit.",
    "reward/flat_groups_fraction": "Share of groups whose attempts all have the same reward: nothing is learned "
    "from them.",
    "reward/std": "Spread of the rewards. Without spread there is no signal.",
    "reward/failed_fraction": "Share of attempts on which a reward function failed.",
    "train/grad_norm": "Length of the gradient before clipping. Peaks announce instability.",
    "train/clip_fraction": "Share of tokens whose update was clipped. 0 with one update a batch.",
    "train/lr": "Learning rate.",
    "throughput/tokens_per_s": "Tokens sampled and trained on per second of the step.",
    "time/step_s": "Seconds of a step by the clock.",
    "rollout/engine_idle_fraction": "Share of the time in which engines had nothing to do.",
    "rollout/lag_mean": "Mean number of versions by which trained tokens are older than the policy.",
    "rollout/lag_max": "Greatest such number.",
    "rollout/dropped_tokens": "Tokens that were sampled and thrown away.",
    "moe/load_peak": "Load of the busiest expert, as a multiple of an even share.",
    "data/epoch": "Times that the data was gone through.",
    "cluster/restarts": "Restarts of trainer processes so far.",
}
"""Sentences by name of metric. Other metrics follow in the order of their names."""
