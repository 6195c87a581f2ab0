"""Replacements that Megatron-Core needs on a CPU: a platform shim, attention, and layers of the local specification."""
