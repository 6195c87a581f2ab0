"""Number formats in which checkpoints on the hub store a weight as several tensors: values of few bits, and scales."""
