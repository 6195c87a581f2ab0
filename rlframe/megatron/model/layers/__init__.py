"""Layers that Megatron does not have, or has otherwise, and their parts."""
