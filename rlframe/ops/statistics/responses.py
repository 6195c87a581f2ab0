"""Statistics of sampled sequences: quantiles, and how much they repeat themselves."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

NGRAM = 4
"""Tokens of the stretches that are compared."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd number whose bits are well mixed: 2^64 over the golden ratio."""
PLACE_BITS = np.uint64(40)


def quantiles(values: Int[np.ndarray, " R"], fractions: Sequence[float]) -> list[float]:
    """Returns the quantiles of the values by nearest rank: the least one that at least this fraction does not
    exceed."""
    ordered = np.sort(values)
    return [float(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]) for fraction in fractions]


def repeated_fraction(tokens: Int[np.ndarray, " N"], lengths: Int[np.ndarray, " R"]) -> float | None:
    """Returns 1 - distinct 4-grams / 4-grams of a sequence, in the mean over the sequences of at least 4 tokens. None
    if there are none.

    0 means that no stretch of four tokens comes twice. Source: seq-rep-4 of Welleck et al. 2019, arXiv 1908.04319.

    Args:
        tokens: those of all sequences, end to end.
        lengths: number of tokens of each sequence.
    """
    grams = np.maximum(lengths - NGRAM + 1, 0)
    if not grams.any():
        return None
    # Sequences in the high bits, a hash of the 4-gram in the others: one sort finds what is equal. Of 8,192 different
    # 4-grams of a sequence two collide with a probability of 3e-5.
    sequence = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    starts = np.flatnonzero(np.repeat(np.cumsum(lengths), lengths) - np.arange(len(tokens)) >= NGRAM)
    with np.errstate(over="ignore"):
        found = np.zeros(len(starts), dtype=np.uint64)
        for place in range(NGRAM):
            found = (found ^ tokens[starts + place].astype(np.uint64)) * MIX
            found ^= found >> np.uint64(29)
        keys = np.sort(sequence[starts] << PLACE_BITS | found * MIX >> np.uint64(64) - PLACE_BITS)
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    distinct = np.bincount((keys[first] >> PLACE_BITS).astype(np.int64), minlength=len(lengths))
    long = grams > 0
    return float((1 - distinct[long] / grams[long]).mean())
