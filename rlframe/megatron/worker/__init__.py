"""The code that runs in a rank: the Ray actor, the trainer, the optimizer and memory."""
