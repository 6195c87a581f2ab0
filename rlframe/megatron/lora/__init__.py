"""Low-rank adapters: attached to a model, saved, and merged into the weights for engines."""
