"""The search finds collisions of a checksum that can be taken apart, and none of ours; a forged one fits one seed."""

import time
from dataclasses import replace

import numpy as np
import pytest

from rlframe.weight_sync.proof.terms import Keys
from tests.campaigns.collisions import Tally, Tensor, forged, keyed, search

FLOAT32, BFLOAT16 = np.dtype(np.uint32), np.dtype(np.uint16)


def separable(words: np.ndarray) -> None:
    """Leaves words as they are: a factor of the row and one of the column are all that tells places apart."""


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor without the keys that are mixed in."""
    return replace(tensor, rows=unmixed(tensor.rows), cols=unmixed(tensor.cols))


def unmixed(keys: Keys) -> Keys:
    return keys._replace(mixers=np.zeros_like(keys.mixers))


def look(tensor: Tensor, seed: int, pairs_of_rows: int) -> Tally:
    tally = Tally()
    search(tally, tensor, seed, until=time.monotonic() + 60, pairs_of_rows=pairs_of_rows)
    return tally


def test_the_search_finds_rectangles_of_a_checksum_without_mixing() -> None:
    found = look(plain(Tensor.draw(FLOAT32, (512, 512), 1, separable)), 1, pairs_of_rows=40).found
    assert any(each.startswith("four signs") for each in found)


def test_the_search_finds_nothing_in_the_checksum_of_weight_sync() -> None:
    for kind in (FLOAT32, BFLOAT16):
        tally = look(Tensor.draw(kind, (256, 512), 2), 2, pairs_of_rows=200)
        assert not tally.found
        # 200 pairs of rows, 512 * 511 rectangles of either kind.
        assert tally.searched["rectangles"] == 200 * 512 * 511


@pytest.mark.thorough
def test_what_is_made_to_collide_under_one_seed_is_seen_under_others() -> None:
    tensor, places = forged(1)
    rows, cols = np.array(places).T
    changed = tensor.bits.copy()
    changed[rows, cols] ^= 1 << 15

    def same(seed: int) -> bool:
        other = Tensor(tensor.bits, *keyed(tensor.bits.shape, BFLOAT16, seed))
        return other.total(changed) == other.total(tensor.bits)

    assert same(1)
    assert not any(same(seed) for seed in range(4, 24))
