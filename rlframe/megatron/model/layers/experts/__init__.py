"""Layers of experts: tokens on their way, and the products of all experts as kernels of a GPU."""
