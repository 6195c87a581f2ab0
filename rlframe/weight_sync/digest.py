"""Positional checksum of tensors, which adds up over shards and cannot be taken apart into rows and columns.

    digest(x) = sum over elements of mix(bits(x[i, j])) * W[i] * w[j]   mod 2^64
    mix(b): b = (b xor o[j]) * M[i] + O[i],  b = b xor (b >> 16),  b = b * m[j] + o[j],  b = b xor (b >> 16)   mod 2^32

`bits` is the element's pattern read as an unsigned number, so -0.0 and 0.0 differ and NaN equals itself. W, M, O belong
to the row, w, m, o to the column. W and w have 64 bits, the others 32; W, w, M, m are odd. All are drawn from a seed by
splitmix64. Being a sum, the digest of a tensor is the sum of the digests of any partition of it, whoever holds which
part.

**A change of any single element is always seen**, whatever the seed. `mix` is a bijection, so that it changes by some D
with 0 < |D| < 2^32, and the sum by D * W * w. An odd number has an inverse mod 2^64, so that this is 0 only if D is.

**Any change of several elements that was not made to fit the seed is missed with probability below 2^-52** (formats of
16 bits; 2^-41 for float32), if the keys are uniform and independent. Take one changed element, of row i and column j,
and the lowest bit s in which its old and new patterns differ.

1. After the first multiplication both values differ in bit s, in none below it, and in each bit above it with
   probability 1/2, independently: the difference is 2^s times a uniform odd number, and O makes the value uniform.
2. The shift by 16 puts the upper half of that on the lower. For s < 16 the lowest difference is then in bit t < 16
   with probability 2^-(t + 1), and in bit 16 + s with 2^-16; for s >= 16 it is in bit s - 16. The second round does the
   same, so that D = 2^v * odd with a mean of 2^v of at most 17, or of 8 + 2^15 where s >= 16.
3. The row's sum of D * w is 0 mod 2^t with probability at most 2^(v + 1 - t), since w is uniform among odd numbers, and
   the total is then 0 with probability at most 2^(t - 63) by W. Over all t that is (65 - v) * 2^(v - 63) at most.

65 * 17 * 2^-63 < 2^-52. Step 3 is multilinear hashing, by columns and then by rows (Carter and Wegman, "Universal
classes of hash functions", 1979; Lemire and Kaser, "Strongly universal string hashing is fast", arXiv 1008.1715).
Without `mix` a random seed gives the same bound, but the factors of rows and columns cancel in rectangles: signs that
flip at four corners give 2^15 (W - W')(w - w'), which some rectangle of a large matrix makes 0. NH (Black et al.,
"UMAC", CRYPTO 1999) is cheaper, but multiplies neighbours, which shards cut apart. `mix` costs two multiplications of
32 bits an element, which a GPU can do while it waits for memory.

**The seed is drawn anew for every run** and sent to both sides. For a known seed collisions can be made: four lists of
changes of single elements hold four that add up to 0 (Wagner, "A generalized birthday problem", CRYPTO 2002), as in any
additive checksum of 64 bits. Nothing of a run's faults knows its seed.
"""

import importlib
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
CHUNK = 1 << 15
"""Elements mixed at a time on the CPU: what fits a core's cache."""
STREAMS = {"row": (0x243F6A8885A308D3, 0x13198A2E03707344), "col": (0xA4093822299F31D0, 0x082EFA98EC4E6C89)}
"""First digits of pi: what tells the keys of rows and columns, and of weights and mixing, apart."""
SHIFT = np.uint32(16)


class Keys(NamedTuple):
    """What the rows, or the columns, of every tensor are told apart by."""

    weights: NDArray[np.uint64]
    """[count] odd: W or w."""
    mixers: NDArray[np.uint64]
    """[count] the multiplier M or m, odd, in the lower 32 bits, the offset O or o in the upper."""

    def part(self, first: int, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.uint32]]:
        """Returns weights, multipliers and offsets, [count] each, of the indices from `first` on."""
        chosen = slice(first, first + count)
        mixers = self.mixers[chosen]
        return self.weights[chosen], mixers.astype(np.uint32), (mixers >> np.uint64(32)).astype(np.uint32)


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
        seed: int = 0,
    ):
        """Looks up the rank's pieces. The parameters' memory must stay where it is.

        Args:
            dtypes: format to cast each tensor to first, for a comparison with a copy of lower precision; as held when
                absent.
            names: the tensors to digest, all those of the layout when None.
            seed: 0..2^64-1, the same on all ranks whose shares are added or compared.

        Raises:
            WeightSyncFailed: a number format without a digest.
        """
        self._size = len(layout.tensors)
        wanted = layout.boxes.keys() if names is None else layout.boxes.keys() & set(names)
        self._held = [(index, name) for index, name in enumerate(layout.tensors) if name in wanted]
        self._indices = np.array([index for index, _ in self._held], dtype=np.int64)
        self._parameters, self._dtypes, self._seed = parameters, dtypes or {}, seed
        held = [name for _, name in self._held]
        self._table = None
        if held and parameters[layout.boxes[held[0]][0].parameter].is_cuda:
            # Triton is there only where CUDA is.
            kernels = importlib.import_module("rlframe.weight_sync.kernels")
            self._table = kernels.DigestTable(layout, parameters, held, self._dtypes, seed=seed)
        else:
            self._distinct = [_distinct(layout.boxes[name]) for name in held]
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
            shares[self._indices] = self._table.shares()
        elif self._held:
            shares[self._indices] = [
                self._share(name, *pieces) for (_, name), pieces in zip(self._held, self._distinct, strict=True)
            ]
        return shares

    def _share(self, name: str, distinct: list[Box], twins: list[Box]) -> np.uint64:
        dtype = self._dtypes.get(name)
        parts = {box.region: _region_digest(box, self._parameters, box.region, dtype, self._seed) for box in distinct}
        for twin in twins:
            if _region_digest(twin, self._parameters, twin.region, dtype, self._seed) != parts[twin.region]:
                raise WeightSyncFailed(twin_differs(name, twin.parameter))
        return np.array(list(parts.values()), dtype=np.uint64).sum(dtype=np.uint64)


def twin_differs(tensor: str, parameter: str) -> str:
    """Says that a rank holds a region of `tensor` twice, with two contents."""
    return f"{tensor}: parameter {parameter} holds another copy of it that differs"


def digest(
    layout: Layout, parameters: Mapping[str, Tensor], *, dtypes: Mapping[str, torch.dtype] | None = None, seed: int = 0
) -> dict[str, int]:
    """This rank's share, 0..2^64-1, of the digest of each tensor it holds part of. Arguments as of DigestPlan."""
    shares = DigestPlan(layout, parameters, dtypes, seed=seed).shares().tolist()
    return {name: share for name, share in zip(layout.tensors, shares, strict=True) if name in layout.boxes}


def region_digests(
    boxes: Iterable[Box],
    parameters: Mapping[str, Tensor],
    regions: Iterable[Region],
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> dict[Region, int]:
    """The digest of each of `regions` that lies wholly in one of the boxes."""
    found = {}
    boxes = list(boxes)
    for region in regions:
        box = next((box for box in boxes if box.region.intersect(region) == region), None)
        if box is not None:
            found[region] = int(_region_digest(box, parameters, region, dtype, seed))
    return found


def _distinct(boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """(the first box of each region, the others)."""
    first: dict[Region, Box] = {}
    twins = [box for box in boxes if first.setdefault(box.region, box) is not box]
    return list(first.values()), twins


def _region_digest(
    box: Box, parameters: Mapping[str, Tensor], region: Region, dtype: torch.dtype | None, seed: int
) -> np.uint64:
    """On the CPU; what lies on a GPU is brought there, which only the search for a difference asks for."""
    view = box.view(parameters, region)
    dtype = dtype or view.dtype
    _known_format(box, dtype)
    row_keys = keys("row", region.row + region.rows, seed)
    cols = keys("col", region.col + region.cols, seed).part(region.col, region.cols)
    total = np.zeros((), dtype=np.uint64)
    step = max(1, CHUNK // region.cols)
    for start in range(0, region.rows, step):
        part = view[start : start + step].to(dtype).contiguous().cpu().view(BITS[dtype]).numpy()
        total += matrix_digest(part, row_keys.part(region.row + start, len(part)), cols)
    return np.uint64(total)


def matrix_digest(bits: NDArray, rows: tuple[NDArray, ...], cols: tuple[NDArray, ...]) -> np.uint64:
    """The sum over a matrix of patterns, [rows, cols] uint16 or uint32.

    Args:
        rows: weights, multipliers and offsets of its rows; see `Keys.part`.
        cols: of its columns.
    """
    mixed = mix(bits, rows, cols)
    sums = np.multiply(mixed, cols[0], dtype=np.uint64).sum(1, dtype=np.uint64)
    return (sums * rows[0]).sum(dtype=np.uint64)


def mix(bits: NDArray, rows: tuple[NDArray, ...], cols: tuple[NDArray, ...]) -> NDArray[np.uint32]:
    """[rows, cols] each pattern mixed with the keys of its row and column; arguments as of `matrix_digest`."""
    _, row_multipliers, row_offsets = rows
    _, col_multipliers, col_offsets = cols
    value = bits ^ col_offsets
    value *= row_multipliers[:, None]
    value += row_offsets[:, None]
    value ^= value >> SHIFT
    value *= col_multipliers
    value += col_offsets
    value ^= value >> SHIFT
    return value


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
        weights, mixers = (splitmix64(_start(seed, stream), size) | np.uint64(1) for stream in STREAMS[axis])
        cached = _cache[axis, seed] = Keys(weights, mixers)
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
