"""Optimizer steps that are skipped."""
