"""Searches for structured changes of a tensor that leave its checksum as it was.

`python -m tests.campaigns.collisions --seconds 3600` writes `examples/benchmarks/results/collisions.json`. Every round
draws a seed and a tensor, whose words hold 8 bytes, and looks at

- rectangles: four signs flip at its corners, or its corners change places in both rows; all rectangles of the rows that
  are tried, those rows first whose weights share most powers of two, as in the audit;
- pairs: two places anywhere exchange their values, or two signs flip; all pairs;
- blocks: rows, columns or shards change places, a square block is transposed, rows are scaled or set to a constant.

`forged` is the other side: it makes a collision for a seed it knows, and other seeds see it.
"""

import argparse
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlframe.weight_sync.proof.terms import WORD_BYTES, Keys, keys, mix, words
from tests.campaigns.trials import RESULTS

logger = logging.getLogger(__name__)

Words = NDArray[np.uint64]
Mix = Callable[[Words], None]
SHAPES = {np.dtype(np.uint32): (512, 512), np.dtype(np.uint16): (2048, 6144)}
"""Of the tensors searched, by their patterns: float32 and bfloat16."""
ZERO = np.uint64(0)


@dataclass
class Tally:
    """What was looked at, and what was found."""

    searched: Counter[str] = field(default_factory=Counter)
    """Changes looked at, by family."""
    found: list[str] = field(default_factory=list)
    closest_bits: float = 64.0
    """log2 of the smallest sum of four terms that was not 0, of the rectangles."""


@dataclass(frozen=True)
class Tensor:
    """A matrix of patterns and the keys of its rows and words."""

    bits: NDArray
    rows: Keys
    cols: Keys
    mixed: Mix = mix

    @classmethod
    def draw(cls, kind: np.dtype, shape: tuple[int, int], seed: int, mixed: Mix = mix) -> "Tensor":
        """Returns normally distributed weights as patterns, with the keys of `seed`."""
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32).view(np.uint32)
        bits = values if kind == np.uint32 else (values >> np.uint32(16)).astype(np.uint16)
        return cls(bits, *keyed(shape, kind, seed), mixed)

    @property
    def unit(self) -> int:
        """Elements of a word."""
        return WORD_BYTES // self.bits.itemsize

    def terms(self, values: Words) -> Words:
        """Returns [rows, words] what each word adds to the checksum."""
        mixed = values ^ self.rows.mixers[:, None] ^ self.cols.mixers
        self.mixed(mixed)
        return mixed * self.rows.weights[:, None] * self.cols.weights

    def total(self, bits: NDArray) -> int:
        """Returns the checksum of other patterns in the same places."""
        return int(self.terms(words(np.ascontiguousarray(bits), self.unit)).sum())

    def changes(self, before: Callable[[Words, np.uint64], Words], after: Callable[[Words, np.uint64], Words]) -> Words:
        """Returns [rows, cols] what one element's change adds. Both functions get the words, and how far up in them the
        element begins."""
        values = words(self.bits, self.unit)
        found = np.empty((*values.shape, self.unit), dtype=np.uint64)
        for place in range(self.unit):
            shift = np.uint64(8 * self.bits.itemsize * place)
            found[:, :, place] = self.terms(after(values, shift)) - self.terms(before(values, shift))
        return found.reshape(self.bits.shape)

    def flips(self) -> Words:
        """Returns [rows, cols] what the flip of each element's sign adds."""
        sign = np.uint64(1 << (8 * self.bits.itemsize - 1))
        return self.changes(lambda values, shift: values, lambda values, shift: values ^ (sign << shift))

    def choices(self, first: int, second: int) -> Words:
        """Returns [rows, cols] what it adds that an element is the pattern `second` instead of `first`."""
        others = np.uint64((1 << 8 * self.bits.itemsize) - 1)

        def become(pattern: int) -> Callable[[Words, np.uint64], Words]:
            return lambda values, shift: values & ~(others << shift) | (np.uint64(pattern) << shift)

        return self.changes(become(first), become(second))


def keyed(shape: tuple[int, int], kind: np.dtype, seed: int) -> tuple[Keys, Keys]:
    """Returns the keys of the rows and of the words of a tensor."""
    count = shape[1] * kind.itemsize // WORD_BYTES
    return keys("row", shape[0], seed).part(0, shape[0]), keys("col", count, seed).part(0, count)


def search(tally: Tally, tensor: Tensor, seed: int, *, until: float, pairs_of_rows: int) -> None:
    """Looks at one tensor, for rectangles in `pairs_of_rows` pairs of rows at most, or until the clock says `until`."""
    name = f"seed {seed}, {tensor.bits.dtype} {tensor.bits.shape}"
    blocks(tally, tensor, name)
    first, second = np.random.default_rng(seed).integers(0, 1 << 15, 2)
    flips, choices = tensor.flips(), tensor.choices(int(first), int(first ^ second ^ 1))
    for family, terms, signed in (("two signs flip", flips, True), ("two places exchange values", choices, False)):
        match(tally, f"{family}: {name}", terms.ravel(), negated=signed)
        tally.searched[family] += terms.size * (terms.size - 1) // 2
    for first_row, second_row in worst_rows(tensor.rows.weights, pairs_of_rows):
        if time.monotonic() > until:
            return
        # Of four flips d + d' + e + e' = 0; of four exchanges d - d' = e - e'.
        match(tally, f"four signs, rows {first_row} {second_row}: {name}", flips[first_row] + flips[second_row])
        exchange = choices[first_row] - choices[second_row]
        match(tally, f"four exchanges, rows {first_row} {second_row}: {name}", exchange, negated=False)
        cols = flips.shape[1]
        tally.searched["rectangles"] += cols * (cols - 1)


def match(tally: Tally, name: str, terms: Words, *, negated: bool = True) -> None:
    """Notes two terms of different places whose sum, or whose difference, is 0."""
    folded = np.minimum(terms, ZERO - terms) if negated else terms
    order = np.sort(folded)
    gaps = order[1:] - order[:-1]
    smallest = gaps.min()
    if smallest:
        tally.closest_bits = min(tally.closest_bits, float(np.log2(float(smallest))))
        return
    # Folding takes d = d' for d = -d'.
    for value in np.unique(order[1:][gaps == 0]):
        places = np.flatnonzero(folded == value)
        signs = terms[places] == value
        if not negated or (signs.any() and not signs.all()):
            tally.found.append(f"{name}: places {places.tolist()}")


def worst_rows(weights: Words, count: int) -> list[tuple[int, int]]:
    """Returns pairs of rows, first those whose weights, or negated weights, have most low bits in common."""
    signed = np.concatenate([weights, np.zeros_like(weights) - weights])
    # In the order of the bits read backwards, neighbours share most low bits.
    order = np.argsort(np.array([int(f"{weight:064b}"[::-1], 2) for weight in signed.tolist()])) % len(weights)
    pairs: dict[tuple[int, int], None] = {}
    for distance in range(1, len(weights)):
        for first, second in zip(order[:-distance], order[distance:], strict=True):
            if first != second:
                pairs[min(int(first), int(second)), max(int(first), int(second))] = None
            if len(pairs) >= count:
                return list(pairs)
    return list(pairs)


def blocks(tally: Tally, tensor: Tensor, name: str) -> None:
    """Tries one change of each kind of block."""
    bits = tensor.bits
    rows, cols = bits.shape
    half, side = rows // 2, min(rows, cols) // 2
    transposed, scaled, constant = bits.copy(), bits.copy(), bits.copy()
    transposed[:side, :side] = bits[:side, :side].T
    # A power of two changes the exponent alone: by one, in bit 23 of float32 or bit 7 of bfloat16.
    scaled[half] += bits.dtype.type(1 << (23 if bits.itemsize == 4 else 7))
    constant[:half, :side] = bits[0, 0]
    changes = {
        "two rows swapped": bits[[1, 0, *range(2, rows)]],
        "two columns swapped": bits[:, [1, 0, *range(2, cols)]],
        "two shards of rows swapped": np.roll(bits, half, 0),
        "two shards of columns swapped": np.roll(bits, cols // 2, 1),
        "a square block transposed": transposed,
        "a row scaled by two": scaled,
        "a block made constant": constant,
        "rows in reverse": bits[::-1],
    }
    before = tensor.total(bits)
    for change, after in changes.items():
        tally.searched[change] += 1
        if tensor.total(after) == before:
            tally.found.append(f"{change}: {name}")


def forged(seed: int, *, lists: int = 1 << 21) -> tuple[Tensor, list[tuple[int, int]]]:
    """Returns a tensor and four places whose flipped signs cancel under the keys of `seed`.

    Four lists of single flips; sums of two that share their low bits are few enough to be sorted for the rest.
    Source: Wagner, "A generalized birthday problem", CRYPTO 2002, section 2.
    """
    tensor = Tensor.draw(np.dtype(np.uint16), (2048, 4096), seed)
    flips = tensor.flips().ravel()
    low = np.uint64(lists - 1)
    merged = []
    for start in (0, 2 * lists):
        left, right = flips[start : start + lists], flips[start + lists : start + 2 * lists]
        order = np.argsort(right & low)
        wanted = (ZERO - left) & low
        at, end = (np.searchsorted((right & low)[order], wanted, side=side) for side in ("left", "right"))
        counts = end - at
        first = np.repeat(np.arange(lists), counts)
        second = order[np.repeat(at - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
        merged.append((left[first] + right[second], start + first, start + lists + second))
    (sums, a, b), (others, c, d) = merged
    _, here, there = np.intersect1d(sums, ZERO - others, return_indices=True)
    assert len(here), "another seed has one"
    places = [int(each) for each in (a[here[0]], b[here[0]], c[there[0]], d[there[0]])]
    return tensor, [divmod(place, tensor.bits.shape[1]) for place in places]


def main() -> None:
    """Searches until the time is up, and writes what was found."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    start, tally, rounds = time.monotonic(), Tally(), 0
    while time.monotonic() < start + seconds:
        for share, (kind, shape) in zip((1, 3), SHAPES.items(), strict=True):
            until = min(start + seconds, time.monotonic() + share * max(15.0, seconds / 16))
            pairs = shape[0] * (shape[0] - 1) // 2
            search(tally, Tensor.draw(kind, shape, rounds), rounds, until=until, pairs_of_rows=pairs)
        rounds += 1
        logger.info("%.0f s, %d seeds, %s", time.monotonic() - start, rounds, dict(tally.searched))
        for each in tally.found:
            logger.info("found: %s", each)
    content = {
        "command": f"python -m tests.campaigns.collisions --seconds {seconds:g}",
        "seeds": rounds,
        "searched": dict(tally.searched),
        "found": tally.found,
        "closest_bits": tally.closest_bits,
    }
    (RESULTS / "collisions.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
