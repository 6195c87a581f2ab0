"""Hugging Face models: where they come from, what their config means, how their tensors become Megatron parameters.

`README.md` beside this file says on one page how to add a family.
"""
