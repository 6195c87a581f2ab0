"""Sizes of the key-value cache."""

from rlframe.models.families.base import Architecture

CPU_CACHE_BYTES = 1 << 30
"""Bytes of the key-value cache on a CPU, unless rollout.kv_cache_gb says another size. A fraction of all memory would
leave too little for the rest of the machine."""


def token_bytes(architecture: Architecture, *, tp: int, itemsize: int) -> float:
    """Returns the bytes of the keys and values of one token on each of `tp` devices. Key heads that tp does not divide
    are copied.

    Args:
        itemsize: bytes of a number.
    """
    if architecture.latent:
        latent = architecture.latent
        # Engines keep the keys of an indexer in 8 bits.
        index = architecture.indexer.head_dim if architecture.indexer else 0
        return architecture.num_layers * ((latent.kv_rank + latent.rotary_head_dim) * itemsize + index)
    heads = max(1, architecture.num_kv_heads / tp)
    layers = architecture.num_layers - sum(architecture.gated_delta_layers)
    return 2 * layers * heads * architecture.head_dim * itemsize
