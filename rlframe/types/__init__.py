"""The nouns of rlframe as dataclasses. Axis letters: P prompts, G rollouts per prompt, R = P*G, L tokens of one
rollout, T packed tokens, V vocabulary, H hidden. Logprobs are nats."""
