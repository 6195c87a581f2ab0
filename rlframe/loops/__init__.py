"""The control flow: one online loop, one offline loop, and what they need (building, phases, checkpoints, metrics)."""
