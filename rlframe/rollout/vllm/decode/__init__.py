"""Decode steps that take less time than those of vLLM alone."""
