"""Proofs about the weights on the trainer's ranks."""
