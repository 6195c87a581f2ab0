"""The model of a rank: its Megatron configuration, layers, heads and forward pass."""
