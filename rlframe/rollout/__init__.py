"""From prompts to rollouts: one file per engine, and the group that drives them all. Imports no megatron."""
