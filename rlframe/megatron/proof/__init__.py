"""Proofs about what the trainer's ranks hold."""
