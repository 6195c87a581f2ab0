"""Low-rank adapters: attached to a model, saved, and merged into what engines get."""
