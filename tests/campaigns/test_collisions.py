"""The search finds collisions of a checksum that can be taken apart, and none of ours; a forged one fits one seed."""

import time

import numpy as np
import pytest

from rlframe.weight_sync.digest import keys
from tests.campaigns.collisions import Tally, Tensor, forged, search

FLOAT32, BFLOAT16 = np.dtype(np.uint32), np.dtype(np.uint16)


def separable(bits: np.ndarray, rows: tuple[np.ndarray, ...], cols: tuple[np.ndarray, ...]) -> np.ndarray:
    """The pattern as it is: a factor of the row and one of the column are all that tells places apart."""
    return bits.astype(np.uint32)


def look(tensor: Tensor, seed: int, pairs_of_rows: int) -> Tally:
    tally = Tally()
    search(tally, tensor, seed, until=time.monotonic() + 60, pairs_of_rows=pairs_of_rows)
    return tally


def test_the_search_finds_rectangles_of_a_checksum_without_mixing() -> None:
    found = look(Tensor.draw(FLOAT32, (512, 512), 1, separable), 1, pairs_of_rows=40).found
    assert any(each.startswith("four signs") for each in found)


def test_the_search_finds_nothing_in_the_checksum_of_weight_sync() -> None:
    for kind in (FLOAT32, BFLOAT16):
        tally = look(Tensor.draw(kind, (256, 512), 2), 2, pairs_of_rows=200)
        assert not tally.found
        # 200 pairs of rows, 512 * 511 rectangles of either kind.
        assert tally.searched["rectangles"] == 200 * 512 * 511


@pytest.mark.thorough
def test_what_is_made_to_collide_under_one_seed_is_seen_under_others() -> None:
    tensor, places = forged(3)
    rows, cols = np.array(places).T
    changed = tensor.bits.copy()
    changed[rows, cols] ^= 1 << 15

    def difference(seed: int) -> int:
        row_keys, col_keys = keys("row", 2048, seed).part(0, 2048), keys("col", 4096, seed).part(0, 4096)
        other = Tensor(tensor.bits, row_keys, col_keys)
        # Of the four rows and columns alone: the rest is the same.
        picked = np.unique(rows), np.unique(cols)
        return int((other.terms(changed, *picked) - other.terms(tensor.bits, *picked)).sum())

    assert difference(3) == 0
    assert all(difference(seed) for seed in range(4, 104))
