"""Pure functions, with their sources: advantages, losses, KL, token weights, packing. Pure torch."""
