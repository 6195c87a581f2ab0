"""Logprobs, entropies and divergences of logits that are split over tensor-parallel ranks."""
