"""Rollout engines and the fleet that drives them: prompts in, rollouts out. Imports no megatron."""
