"""Positional checksum of tensors, which adds up over shards and cannot be taken apart into rows and columns.

    digest(x) = sum over rows i and words u of mix(word(x[i, u]) xor K[i] xor k[u]) * W[i] * w[u]   mod 2^64
    mix(z): z = z * A,  z = z xor (z >> 32),  z = z * B,  z = z xor (z >> 32)                       mod 2^64

A word is 4 neighbouring elements of a row in formats of 16 bits, 2 of float32, as they lie in memory; fewer in tensors
that some rank's shard cuts elsewhere (`units`), the rest of the word being 0. -0.0 and 0.0 differ; NaN equals itself.
K and W belong to the row, k and w to the word's column; all have 64 bits and are drawn from a seed by splitmix64, W and
w odd; A and B are odd constants. Being a sum, the digest of a tensor is the sum of the digests of any partition of it
into whole words, whoever holds which part.

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

import importlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Box, Region
from rlframe.weight_sync.layout import Layout

BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.uint16, torch.float32: torch.uint32}
"""Unsigned type with the bits of each number format."""
CHUNK = 1 << 14
"""Words mixed at a time on the CPU: what fits a core's cache."""
STREAMS = {"row": (0x243F6A8885A308D3, 0x13198A2E03707344), "col": (0xA4093822299F31D0, 0x082EFA98EC4E6C89)}
"""First digits of pi: what tells the keys of rows and columns, and of weights and mixing, apart."""
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""A and B: those of splitmix64."""
WORD_BYTES = 8


class Keys(NamedTuple):
    """What the rows, or the columns, of every tensor are told apart by; [count] each."""

    mixers: NDArray[np.uint64]
    """K or k."""
    weights: NDArray[np.uint64]
    """W or w, odd."""

    def part(self, first: int, count: int) -> "Keys":
        """Those of the indices from `first` on."""
        return Keys(*(each[first : first + count] for each in self))


class DigestPlan:
    """A rank's digest shares, worked out again and again: what does not change is looked up once.

    Example:
        >>> plan = DigestPlan(layout, parameters)
        >>> dict(zip(layout.tensors, plan.shares()))["model.norm.weight"]
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        names: Sequence[str] | None = None,
        units: Mapping[str, int] | None = None,
        seed: int = 0,
    ):
        """Looks up the rank's pieces. The parameters' memory must stay where it is.

        Args:
            dtypes: format to cast each tensor to first, for a comparison with a copy of lower precision; as held when
                absent.
            names: the tensors to digest, all those of the layout when None.
            units: elements, 1, 2 or 4, of which every box of a tensor begins and ends at a multiple in its columns, on
                all ranks whose shares are added or compared; 1 when absent. See `common_units`.
            seed: 0..2^64-1, the same on all ranks whose shares are added or compared.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        self._size = len(layout.tensors)
        wanted = layout.boxes.keys() if names is None else layout.boxes.keys() & set(names)
        self._held = [(index, name) for index, name in enumerate(layout.tensors) if name in wanted]
        self.indices = np.array([index for index, _ in self._held], dtype=np.int64)
        """[n] places of the digested tensors in the layout's."""
        self._parameters, self._dtypes, self._units, self._seed = parameters, dtypes or {}, units or {}, seed
        held = [name for _, name in self._held]
        self._table = None
        if held and parameters[layout.boxes[held[0]][0].parameter].is_cuda:
            # Triton is there only where CUDA is.
            kernels = importlib.import_module("rlframe.weight_sync.digest_kernels")
            self._table = kernels.DigestTable(layout, parameters, held, self._dtypes, units=units, seed=seed)
        else:
            self._distinct = [distinct(layout.boxes[name]) for name in held]
            for name in held:
                _known_format(layout.boxes[name][0], self._dtypes.get(name, layout.dtype(name)))

    def shares(self) -> NDArray[np.uint64]:
        """[tensors of the layout] this rank's share of each tensor's digest, 0 where it holds nothing; each region
        counts once.

        Raises:
            WeightSyncFailed: a region held twice (a tied weight) with two contents.
        """
        shares = np.zeros(self._size, dtype=np.uint64)
        if self._table is not None:
            shares[self.indices] = self._table.shares()
        elif self._held:
            shares[self.indices] = [
                self._share(name, *pieces) for (_, name), pieces in zip(self._held, self._distinct, strict=True)
            ]
        return shares

    def _share(self, name: str, first: list[Box], twins: list[Box]) -> np.uint64:
        dtype, unit = self._dtypes.get(name), self._units.get(name, 1)

        def whole(box: Box) -> np.uint64:
            return _region_digest(box, self._parameters, box.region, dtype, unit, self._seed)

        parts = {box.region: whole(box) for box in first}
        for twin in twins:
            if whole(twin) != parts[twin.region]:
                raise WeightSyncFailed(twin_differs(name, twin.parameter))
        return np.array(list(parts.values()), dtype=np.uint64).sum(dtype=np.uint64)


def twin_differs(tensor: str, parameter: str) -> str:
    """Says that a rank holds a region of `tensor` twice, with two contents."""
    return f"{tensor}: parameter {parameter} holds another copy of it that differs"


def digest(
    layout: Layout,
    parameters: Mapping[str, Tensor],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    units: Mapping[str, int] | None = None,
    seed: int = 0,
) -> dict[str, int]:
    """This rank's share, 0..2^64-1, of the digest of each tensor it holds part of. Arguments as of DigestPlan."""
    shares = DigestPlan(layout, parameters, dtypes, units=units, seed=seed).shares().tolist()
    return {name: share for name, share in zip(layout.tensors, shares, strict=True) if name in layout.boxes}


def region_digests(
    boxes: Iterable[Box],
    parameters: Mapping[str, Tensor],
    regions: Iterable[Region],
    *,
    dtype: torch.dtype | None = None,
    unit: int = 1,
    seed: int = 0,
) -> dict[Region, int]:
    """The digest of each of `regions`, which are cut at multiples of `unit`, that lies wholly in one of the boxes."""
    found = {}
    boxes = list(boxes)
    for region in regions:
        box = next((box for box in boxes if box.region.intersect(region) == region), None)
        if box is not None:
            found[region] = int(_region_digest(box, parameters, region, dtype, unit, seed))
    return found


def common_units(layouts: Iterable[Layout]) -> dict[str, int]:
    """The largest `unit` of each tensor that suits all these ranks, of those above 1."""
    ends: dict[str, int] = {}
    for layout in layouts:
        for name, boxes in layout.boxes.items():
            ends[name] = math.gcd(
                ends.get(name, WORD_BYTES // 2), *(end for box in boxes for end in (box.col, box.cols))
            )
    return {name: unit for name, unit in ends.items() if unit > 1}


def word_elements(unit: int, dtype: torch.dtype) -> int:
    """Elements of a word of a tensor in format `dtype` whose shards are cut at multiples of `unit`."""
    return min(unit, WORD_BYTES // dtype.itemsize)


def distinct(boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """(the first box of each region, the others)."""
    first: dict[Region, Box] = {}
    twins = [box for box in boxes if first.setdefault(box.region, box) is not box]
    return list(first.values()), twins


def _region_digest(
    box: Box, parameters: Mapping[str, Tensor], region: Region, dtype: torch.dtype | None, unit: int, seed: int
) -> np.uint64:
    """On the CPU; what lies on a GPU is brought there, which only the search for a difference asks for."""
    view = box.view(parameters, region)
    dtype = dtype or view.dtype
    _known_format(box, dtype)
    unit = word_elements(unit, dtype)
    row_keys = keys("row", region.row + region.rows, seed)
    first, count = region.col // unit, region.cols // unit
    cols = keys("col", first + count, seed).part(first, count)
    total = np.zeros((), dtype=np.uint64)
    step = max(1, CHUNK // count)
    for start in range(0, region.rows, step):
        # A copy: torch will not resize a storage that numpy has looked at, as sleeping optimizers do with theirs.
        part = view[start : start + step].to(dtype, copy=True).contiguous().cpu().view(BITS[dtype]).numpy()
        total += words_digest(words(part, unit), row_keys.part(region.row + start, len(part)), cols)
    return np.uint64(total)


def words(bits: NDArray, unit: int) -> NDArray[np.uint64]:
    """[rows, cols / unit] the words of a contiguous matrix of patterns, [rows, cols] uint16 or uint32."""
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[unit * bits.itemsize]
    return bits.view(kind).astype(np.uint64, copy=False)


def words_digest(words: NDArray[np.uint64], rows: Keys, cols: Keys) -> np.uint64:
    """The sum over a matrix of words, with the keys of its rows and columns."""
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


def _known_format(box: Box, dtype: torch.dtype) -> None:
    if dtype not in BITS:
        raise WeightSyncFailed(f"{box.tensor} is held as {dtype}; digests know {', '.join(map(str, BITS))}")


_cache: dict[tuple[str, int], Keys] = {}


def keys(axis: str, count: int, seed: int) -> Keys:
    """The keys of `count` indices or more of an axis, `row` or `col`; kept between calls, for one seed or two."""
    cached = _cache.get((axis, seed))
    if cached is None or len(cached.weights) < count:
        size = 1 << max(count - 1, 1).bit_length()
        if len(_cache) >= 2 * len(STREAMS):
            _cache.pop(next(iter(_cache)))
        mixers, weights = (splitmix64(_start(seed, stream), size) for stream in STREAMS[axis])
        cached = _cache[axis, seed] = Keys(mixers, weights | np.uint64(1))
    return cached


def _start(seed: int, stream: int) -> int:
    """Where a stream of keys begins: by the seed, and far from those of the other streams."""
    return int(splitmix64(seed ^ stream, 1)[0])


def splitmix64(seed: int, count: int) -> NDArray[np.uint64]:
    """[count] random numbers of 64 bits.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    """
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return state ^ state >> np.uint64(31)
