"""Settings of training: dataclasses and enums, without a Megatron import."""
