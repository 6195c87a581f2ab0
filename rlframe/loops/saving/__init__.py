"""Checkpoints and exports of a run."""
