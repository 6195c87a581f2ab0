"""Settings of training: dataclasses and enums. Imports no Megatron."""
