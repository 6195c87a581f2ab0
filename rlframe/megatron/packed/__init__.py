"""Rows of a packed forward pass: inputs, and their split over context-parallel ranks."""
