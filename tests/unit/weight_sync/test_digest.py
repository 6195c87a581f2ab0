"""The positional checksum, against plain Python integers."""

import sys
from collections.abc import KeysView
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.boxes import Region
from rlframe.weight_sync.layout.memory import MemoryLayout, record
from rlframe.weight_sync.proof import terms as digests
from rlframe.weight_sync.proof.digest import CHUNK, DigestPlan, common_units, digest, region_digests
from rlframe.weight_sync.proof.terms import STREAMS

WRAP = 1 << 64


def splitmix64(seed: int, index: int) -> int:
    """The published generator in Python integers: state seed + (index + 1) * golden ratio, two multiply-xorshifts."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % WRAP
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WRAP
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WRAP
    return z ^ (z >> 31)


def key(axis: str, index: int, seed: int) -> tuple[int, int]:
    """(mixer, weight) of a row or a word's column in Python integers."""
    mixer, weight = (splitmix64(splitmix64(seed ^ stream, 0), index) for stream in STREAMS[axis])
    return mixer, weight | 1


def share(word: int, row: int, col: int, seed: int = 0) -> int:
    """What one word adds, by the formula of the module's docstring."""
    (row_mixer, row_weight), (col_mixer, col_weight) = key("row", row, seed), key("col", col, seed)
    value = (word ^ row_mixer ^ col_mixer) * 0xBF58476D1CE4E5B9 % WRAP
    value ^= value >> 32
    value = value * 0x94D049BB133111EB % WRAP
    value ^= value >> 32
    return value * row_weight * col_weight % WRAP


def one_box(value: Tensor, seed: int = 0, unit: int = 1) -> int:
    """Digest of a tensor held whole."""
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": value}, {"t": tuple(value.shape)})
    return digest(layout, {"p": value}, units={"t": unit}, seed=seed)["t"]


def test_splitmix64_gives_the_published_outputs() -> None:
    # Seed 0, first output of the reference implementation (Vigna, splitmix64.c): e220a8397b1dcdaf.
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF
    for seed in (0, 3, WRAP - 1):
        assert digests.splitmix64(seed, 100).tolist() == [splitmix64(seed, index) for index in range(100)]


def test_keys_do_not_depend_on_how_many_are_asked_for() -> None:
    few = digests.keys("row", 3, 8)
    many = digests.keys("row", 5000, 8)
    assert many.weights[:3].tolist() == few.weights[:3].tolist()
    assert many.mixers[:3].tolist() == few.mixers[:3].tolist()
    assert all(value % 2 for value in many.weights.tolist())


def test_several_threads_may_ask_for_keys_of_many_seeds() -> None:
    """As several frozen models do, each with a seed and threads of its own."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def ask(first: int) -> bool:
        return all(len(digests.keys("row", 2, first + seed).weights) >= 2 for seed in range(3000))

    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ask, [0, 0, 10_000, 10_000]))
    finally:
        sys.setswitchinterval(before)


def test_digest_of_four_elements_by_hand() -> None:
    # bfloat16 patterns: 1.0 = 0x3F80, -2.0 = 0xC000, 0.5 = 0x3F00, -0.0 = 0x8000.
    expected = (share(0x3F80, 0, 0) + share(0xC000, 0, 1) + share(0x3F00, 1, 0) + share(0x8000, 1, 1)) % WRAP
    assert one_box(torch.tensor([[1.0, -2.0], [0.5, -0.0]], dtype=torch.bfloat16)) == expected
    # float32 patterns: 1.0 = 0x3F800000, -2.0 = 0xC0000000.
    assert one_box(torch.tensor([[1.0, -2.0]])) == (share(0x3F800000, 0, 0) + share(0xC0000000, 0, 1)) % WRAP


def test_a_word_is_as_many_elements_as_the_shards_and_eight_bytes_allow() -> None:
    # 1.0 and -2.0, then 0.5 and -0.0, the first in the lowest bits.
    value = torch.tensor([[1.0, -2.0, 0.5, -0.0]], dtype=torch.bfloat16)
    assert one_box(value, unit=2) == (share(0xC000_3F80, 0, 0) + share(0x8000_3F00, 0, 1)) % WRAP
    assert one_box(value, unit=4) == share(0x8000_3F00_C000_3F80, 0, 0)
    # Two float32 fill a word.
    assert one_box(torch.tensor([[1.0, -2.0]]), unit=4) == share(0xC0000000_3F800000, 0, 0)
    # So do eight numbers of 8 bits: 1.0 = 0x38, -2.0 = 0xC0, 448 = 0x7E, -0.0 = 0x80. Alone each is a word.
    value = torch.tensor([[1.0, -2.0, 448.0, -0.0, 0.0, 0.0, 0.0, 1.0]]).to(torch.float8_e4m3fn)
    assert one_box(value, unit=8) == share(0x38000000_807EC038, 0, 0)
    assert one_box(value[:, :2].contiguous()) == (share(0x38, 0, 0) + share(0xC0, 0, 1)) % WRAP


def test_the_unit_of_a_tensor_suits_every_rank() -> None:
    def rank(start: int, end: int, width: int) -> MemoryLayout:
        value = torch.zeros(2, end - start)
        return record(lambda p, c: p["p"].copy_(c["t"][:, start:end]), {"p": value}, {"t": (2, width)})

    assert common_units([rank(0, 8, 16), rank(8, 16, 16), rank(0, 16, 16)]) == {"t": 8}
    assert common_units([rank(0, 6, 16), rank(6, 16, 16)]) == {"t": 2}
    assert common_units([rank(0, 7, 16)]) == {}


@pytest.mark.parametrize("change", [0x8000, 0x8000_8000_8000_8000, 0x8000 << 48, 1, 1 << 63, 1 << 32, 0x80 << 16])
def test_mixing_leaves_few_zeros_below_a_difference(change: int) -> None:
    # The bound needs P(at least t zeros) near 2^-t for random inputs of a given difference: signs, one or all four; the
    # lowest and the highest bit; a power of two. Of 200,000 about 195 have 10 zeros or more, with a deviation of 14.
    before = np.random.default_rng(change % 1000).integers(0, WRAP, 200_000, dtype=np.uint64)
    after = before ^ np.uint64(change)
    for value in (before, after):
        digests.mix(value)
    difference = after - before
    for zeros in range(1, 11):
        share = float((difference % np.uint64(1 << zeros) == 0).mean())
        assert share <= 2.0**-zeros * 1.5 + 1e-5


def test_every_seed_has_a_digest_of_its_own() -> None:
    value = torch.tensor([[1.0]])
    seeds = (0, 1, 2, WRAP - 1)
    assert [one_box(value, seed) for seed in seeds] == [share(0x3F800000, 0, 0, seed) for seed in seeds]
    assert len({one_box(value, seed) for seed in seeds}) == 4


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_a_change_of_any_single_bit_is_seen(unit: int) -> None:
    value = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = one_box(value, unit=unit)
    for element in range(24):
        for bit in range(16):
            changed = value.clone()
            changed.view(torch.int16).view(-1)[element] ^= -(1 << 15) if bit == 15 else 1 << bit
            assert one_box(changed, unit=unit) != before


def test_swapped_rows_columns_and_elements_are_seen() -> None:
    value = torch.arange(12.0).view(3, 4)
    swapped = [value[[1, 0, 2]], value[:, [1, 0, 2, 3]], value.flip(0, 1)]
    assert len({one_box(value), *map(one_box, swapped)}) == 4


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_shards_add_up_across_chunks(unit: int) -> None:
    # More elements than one chunk, cut by rows and by columns.
    value = torch.randn(2100, 1000, generator=torch.Generator().manual_seed(1))
    assert value.numel() > 2 * CHUNK
    parts = [(slice(0, 700), slice(0, 1000)), (slice(700, 2100), slice(0, 300)), (slice(700, 2100), slice(300, 1000))]
    total = 0
    for rows, cols in parts:
        piece = value[rows, cols].contiguous()
        layout = record(
            lambda p, c, rows=rows, cols=cols: p["p"].copy_(c["t"][rows, cols]), {"p": piece}, {"t": (2100, 1000)}
        )
        total += digest(layout, {"p": piece}, units={"t": unit})["t"]
    assert total % WRAP == one_box(value, unit=unit)


def test_the_cast_comes_before_the_bits() -> None:
    value = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": value}, {"t": (4, 4)})
    assert digest(layout, {"p": value}, dtypes={"t": torch.bfloat16})["t"] == one_box(value.bfloat16())


def test_a_region_held_twice_counts_once_and_must_agree() -> None:
    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        p["embedding"].copy_(c["t"])
        p["head"].copy_(c["t"])

    parameters = {"embedding": torch.arange(6.0).view(2, 3), "head": torch.arange(6.0).view(2, 3)}
    layout = record(load, parameters, {"t": (2, 3)})
    assert digest(layout, parameters)["t"] == one_box(parameters["head"])
    parameters["head"][1, 2] += 1
    with pytest.raises(WeightSyncFailed, match="t: parameter head holds another copy"):
        digest(layout, parameters)


def test_other_number_formats_are_refused_by_name() -> None:
    with pytest.raises(WeightSyncFailed, match="t is held as torch.float64"):
        one_box(torch.zeros(2, 2, dtype=torch.float64))


def test_region_digests_add_up_to_the_tensor() -> None:
    value = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": value}, {"t": (4, 6)})
    regions = [Region(0, 4, 0, 2), Region(0, 1, 2, 4), Region(1, 3, 2, 4), Region(3, 2, 0, 6)]
    found = region_digests(layout.boxes["t"], {"p": value}, regions)
    assert list(found) == regions[:3]  # the last reaches beyond the box
    assert sum(found.values()) % WRAP == one_box(value)


def test_a_plan_looks_its_tensors_up_once_and_not_once_for_each() -> None:
    class Counted(dict):
        calls = 0

        def keys(self) -> KeysView:
            Counted.calls += 1
            return super().keys()

    names = [f"t{index}" for index in range(50)]
    parameters = {name: torch.zeros(2, 3) for name in names}

    def load(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
        for name in names:
            p[name].copy_(c[name])

    layout = record(load, parameters, dict.fromkeys(names, (2, 3)))
    # With 18,867 tensors the square of it took 17 s.
    DigestPlan(replace(layout, boxes=Counted(layout.boxes)), parameters)
    assert Counted.calls <= 2
