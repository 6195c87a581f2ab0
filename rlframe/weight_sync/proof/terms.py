"""Positional checksum of tensors, which adds up over shards and cannot be taken apart into rows and columns.

    digest(x) = sum over rows i and words u of mix(word(x[i, u]) xor K[i] xor k[u]) * W[i] * w[u]   mod 2^64
    mix(z): z = z * A,  z = z xor (z >> 32),  z = z * B,  z = z xor (z >> 32)                       mod 2^64

A word is 4 neighbouring elements of a row in formats of 16 bits, 2 of float32, 8 of 8 bits, as they lie in memory;
fewer in tensors that some rank's shard cuts elsewhere (`units`), the rest of the word being 0. -0.0 and 0.0 differ; NaN
equals itself. K and W belong to the row, k and w to the word's column; all have 64 bits and are drawn from a seed by
splitmix64, W and w odd; A and B are odd constants. Being a sum, the digest of a tensor is the sum of the digests of any
partition of it into whole words, whoever holds which part.

**A change within one word, so of any single element, is always seen**, whatever the seed: `mix` is a bijection, so that
it changes by some D that is not 0 mod 2^64, and the sum by D * W * w. Odd numbers have an inverse mod 2^64.

**A change of several words that was not made to fit the seed is missed about once in 2^56 syncs.** Let v be the fewest
zeros at the low end of any changed word's D, in row i and column u. The row's sum of D * w is 0 mod 2^t with
probability at most 2^(v + 1 - t), w being uniform among odd numbers, and the total is then 0 with probability at most
2^(t - 63) by W; over all t that is (65 - v) * 2^(v - 63) at most. This is multilinear hashing, by columns and then by
rows (Carter and Wegman, "Universal classes of hash functions", 1979; Lemire and Kaser, "Strongly universal string
hashing is fast", arXiv 1008.1715). Under a random K the values before and after a change are two random inputs of `mix`
with a given difference, and v is at least t with probability near 2^-t (a test measures it, for flips of every bit and
of signs), so that the mean of 2^v over the two words or more is about 2.

Without `mix` a random seed gives nearly the same bound, but the factors of rows and columns cancel in rectangles: signs
that flip at four corners give 2^15 (W - W')(w - w'), which some rectangle of a large matrix makes 0. With it, what a
flip adds depends on row and column together, and so does what is added by rows, columns, shards and blocks that change
places, are transposed, scaled or constant: nothing of a change's shape is left for a sum to cancel.

How it was chosen: 1.15 times a read on an H200 leaves some 7 instructions an element. To mix each by itself took 2.4
reads; words share the work and take 1.01 to 1.05 (`examples/benchmarks/digest.py`). NH (Black et al., "UMAC", CRYPTO
1999) is cheaper still, but sees a single change with probability 1 - 2^-32 only.

**The seed is drawn anew for every run** and sent to both sides. For a known seed collisions can be made: four lists of
changes of single elements hold four that add up to 0 (Wagner, "A generalized birthday problem", CRYPTO 2002), as in any
additive checksum of 64 bits. Nothing of a run's faults knows its seed.
"""

import threading
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlframe.weight_sync.layout.boxes import Box, Region

BITS = {
    torch.bfloat16: torch.uint16,
    torch.float16: torch.uint16,
    torch.float32: torch.uint32,
    torch.float8_e4m3fn: torch.uint8,
}
"""Unsigned type with the bits of each number format."""
STREAMS = {"row": (0x243F6A8885A308D3, 0x13198A2E03707344), "col": (0xA4093822299F31D0, 0x082EFA98EC4E6C89)}
"""First digits of pi, which distinguish the keys of rows and columns, and of weights and mixing."""
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Factors A and B, those of splitmix64."""
WORD_BYTES = 8


class Keys(NamedTuple):
    """Keys of the rows, or of the columns, of every tensor; [count] each."""

    mixers: NDArray[np.uint64]
    """Keys K or k."""
    weights: NDArray[np.uint64]
    """Weights W or w, odd."""

    def part(self, first: int, count: int) -> "Keys":
        """Returns the keys of the indices from `first` on."""
        return Keys(*(each[first : first + count] for each in self))


def word_elements(unit: int, dtype: torch.dtype) -> int:
    """Returns the elements of a word of a tensor in format `dtype` whose shards are split at multiples of `unit`."""
    return min(unit, WORD_BYTES // dtype.itemsize)


def distinct(boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """Returns (the first box of each region, the others)."""
    first: dict[Region, Box] = {}
    twins = [box for box in boxes if first.setdefault(box.region, box) is not box]
    return list(first.values()), twins


def words(bits: NDArray, unit: int) -> NDArray[np.uint64]:
    """Returns [rows, cols / unit] the words of a contiguous matrix of patterns, [rows, cols] uint8, uint16 or
    uint32."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[unit * bits.itemsize]
    return bits.view(kind).astype(np.uint64, copy=False)


def words_digest(words: NDArray[np.uint64], rows: Keys, cols: Keys) -> np.uint64:
    """Returns the sum over a matrix of words, with the keys of its rows and columns."""
    mixed = words ^ rows.mixers[:, None]
    mixed ^= cols.mixers
    mix(mixed)
    mixed *= cols.weights
    return (mixed.sum(1, dtype=np.uint64) * rows.weights).sum(dtype=np.uint64)


def mix(value: NDArray[np.uint64]) -> None:
    """Mixes each word, in place."""
    for factor in (FIRST_FACTOR, SECOND_FACTOR):
        value *= np.uint64(factor)
        value ^= value >> np.uint64(32)


_cache: dict[tuple[str, int], Keys] = {}
_lock = threading.Lock()
"""Held while the cache is used: frozen models are digested by several threads."""


def keys(axis: str, count: int, seed: int) -> Keys:
    """Returns the keys of at least `count` indices of an axis, `row` or `col`. They are kept between calls, for one
    seed or two."""
    with _lock:
        cached = _cache.get((axis, seed))
        if cached is None or len(cached.weights) < count:
            size = 1 << max(count - 1, 1).bit_length()
            if len(_cache) >= 2 * len(STREAMS):
                _cache.pop(next(iter(_cache)))
            mixers, weights = (splitmix64(_start(seed, stream), size) for stream in STREAMS[axis])
            cached = _cache[axis, seed] = Keys(mixers, weights | np.uint64(1))
    return cached


def _start(seed: int, stream: int) -> int:
    """Returns the start of a stream of keys: derived from the seed, and far from those of the other streams."""
    return int(splitmix64(seed ^ stream, 1)[0])


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """Returns [count] random numbers of 64 bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)


def twin_differs(tensor: str, parameter: str) -> str:
    """Returns the error that a rank holds a region of `tensor` twice, with two contents."""
    return f"{tensor}: parameter {parameter} holds another copy of it that differs"
