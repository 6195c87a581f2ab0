"""The control flow: one online loop, one offline loop, and their parts (phases, samplers, checkpoints, metrics)."""
