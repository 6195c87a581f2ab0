"""The positional checksum, against plain Python integers."""

from collections.abc import KeysView
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.boxes import Region
from rlframe.weight_sync.digest import CHUNK, SEEDS, DigestPlan, digest, multipliers, region_digests
from rlframe.weight_sync.layout import record

WRAP = 1 << 64
CPU = torch.device("cpu")


def splitmix64(seed: int, index: int) -> int:
    """The published generator in Python integers: state seed + (index + 1) * golden ratio, two multiply-xorshifts."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % WRAP
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WRAP
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WRAP
    return z ^ (z >> 31)


def one_box(value: Tensor) -> int:
    """Digest of a tensor held whole."""
    layout = record(lambda p, c: p["p"].copy_(c["t"]), {"p": value}, {"t": tuple(value.shape)})
    return digest(layout, {"p": value})["t"]


def test_splitmix64_reference_gives_the_published_first_output() -> None:
    # Seed 0, first output of the reference implementation (Vigna, splitmix64.c): e220a8397b1dcdaf.
    assert splitmix64(0, 0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("kind", ["row", "col"])
def test_multipliers_are_splitmix64_with_the_last_bit_set(kind: str) -> None:
    expected = [splitmix64(SEEDS[kind], index) | 1 for index in range(100)]
    assert [value % WRAP for value in multipliers(kind, 100, CPU).tolist()] == expected


def test_multipliers_do_not_depend_on_how_many_are_asked_for() -> None:
    few = multipliers("row", 3, CPU).clone()
    assert torch.equal(multipliers("row", 5000, CPU)[:3], few)


def test_digest_of_four_elements_by_hand() -> None:
    # bfloat16 patterns: 1.0 = 0x3F80, -2.0 = 0xC000, 0.5 = 0x3F00, -0.0 = 0x8000.
    r = [splitmix64(SEEDS["row"], index) | 1 for index in range(2)]
    c = [splitmix64(SEEDS["col"], index) | 1 for index in range(2)]
    expected = (0x3F80 * r[0] * c[0] + 0xC000 * r[0] * c[1] + 0x3F00 * r[1] * c[0] + 0x8000 * r[1] * c[1]) % WRAP
    assert one_box(torch.tensor([[1.0, -2.0], [0.5, -0.0]], dtype=torch.bfloat16)) == expected
    # float32 patterns: 1.0 = 0x3F800000, -2.0 = 0xC0000000: the sign bit counts as 2^31, not as minus.
    expected = (0x3F800000 * r[0] * c[0] + 0xC0000000 * r[0] * c[1]) % WRAP
    assert one_box(torch.tensor([[1.0, -2.0]])) == expected


def test_a_change_of_any_single_bit_is_seen() -> None:
    value = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = one_box(value)
    for element in range(15):
        for bit in range(16):
            changed = value.clone()
            changed.view(torch.int16).view(-1)[element] ^= -(1 << 15) if bit == 15 else 1 << bit
            assert one_box(changed) != before


def test_swapped_rows_columns_and_elements_are_seen() -> None:
    value = torch.arange(12.0).view(3, 4)
    swapped = [value[[1, 0, 2]], value[:, [1, 0, 2, 3]], value.flip(0, 1)]
    assert len({one_box(value), *map(one_box, swapped)}) == 4


def test_shards_add_up_across_chunks() -> None:
    # More elements than one chunk, cut by rows and by columns.
    value = torch.randn(2100, 1000, generator=torch.Generator().manual_seed(1))
    assert value.numel() > 2 * CHUNK["cpu"]
    parts = [(slice(0, 700), slice(0, 1000)), (slice(700, 2100), slice(0, 300)), (slice(700, 2100), slice(300, 1000))]
    total = 0
    for rows, cols in parts:
        piece = value[rows, cols].contiguous()
        layout = record(
            lambda p, c, rows=rows, cols=cols: p["p"].copy_(c["t"][rows, cols]), {"p": piece}, {"t": (2100, 1000)}
        )
        total += digest(layout, {"p": piece})["t"]
    assert total % WRAP == one_box(value)


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
