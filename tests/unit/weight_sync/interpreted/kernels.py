"""The GPU's copies and checksums, on the CPU by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.utils.errors import WeightSyncFailed
from rlframe.weight_sync.layout.memory import MemoryLayout, record
from rlframe.weight_sync.plan import copy_kernels as kernels
from rlframe.weight_sync.proof import digest_kernels
from rlframe.weight_sync.proof.digest import common_units, digest
from rlframe.weight_sync.warm_up import compile_kernels

CPU = torch.device("cpu")


def pair(source: Tensor, target: Tensor) -> kernels.Pair:
    """The copy of one matrix onto another."""
    assert source.shape == target.shape
    return kernels.Pair(source.data_ptr(), target.data_ptr(), *source.shape, *source.stride(), *target.stride())


def random_bits(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values that bfloat16 holds exactly: Triton's interpreter does not round (see tests/gpu for that)."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_of_every_alignment_arrive_and_nothing_else_is_written(dtype: torch.dtype) -> None:
    source = random_bits(70, 160, dtype=dtype)
    target = torch.full((70, 320), -7.0, dtype=dtype)
    expected = target.clone()
    # (rows, columns, first column at the source, at the target): odd ones move element by element, even ones wider.
    blocks = [(0, 20, 0, 64, 0, 0), (20, 40, 8, 96, 16, 0), (40, 41, 1, 2, 3, 1), (50, 70, 3, 33, 7, 0)]
    pairs = []
    for first, end, read, width, written, _ in blocks:
        here, there = source[first:end, read : read + width], target[first:end, written : written + width]
        expected[first:end, written : written + width] = here
        pairs.append(pair(here, there))
    kernels.CopyTable(pairs, dtype, dtype, CPU, lanes=[0, 1, 0, 1]).run()
    assert torch.equal(target, expected)


def test_whole_contiguous_blocks_become_one_row() -> None:
    source = random_bits(300, 64, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    kernels.CopyTable([pair(source, target)], torch.bfloat16, torch.bfloat16, CPU).run()
    assert torch.equal(source, target)


def test_a_transposed_block_and_another_number_format_are_copied_element_by_element() -> None:
    source, target = random_bits(40, 24, dtype=torch.float32), torch.zeros(24, 40, dtype=torch.bfloat16)
    kernels.CopyTable([pair(source.T, target)], torch.float32, torch.bfloat16, CPU).run()
    assert torch.equal(target, source.T.to(torch.bfloat16))


def sharded(parameters: dict[str, Tensor]) -> MemoryLayout:
    """Rows of `wide` from two tensors, the right half of `narrow`'s columns, a bias, and `tied` held twice."""

    def load(p: dict[str, Tensor], c: dict[str, Tensor]) -> None:
        # A tile has 16 rows of 256 words: a whole one, and some that end with the tensor.
        p["wide"][:17].copy_(c["gate"][5:22])
        p["wide"][17:].copy_(c["up"][5:8])
        p["narrow"].copy_(c["down"].chunk(2, dim=1)[1])
        p["bias"].copy_(c["bias"])
        for name in ("embedding", "output"):
            p[name].copy_(c["tied"])

    width = parameters["wide"].shape[1]
    shapes = {
        "gate": (40, width),
        "up": (40, width),
        "down": (20, 50),
        "absent": (3, 3),
        "bias": (17,),
        "tied": (9, 16),
    }
    return record(load, parameters, shapes)


def parameters(dtype: torch.dtype, *, width: int = 1028) -> dict[str, Tensor]:
    shapes = {"wide": (20, width), "narrow": (20, 25), "bias": (17,), "embedding": (9, 16)}
    made = {name: random_bits(*shape, dtype=dtype, seed=index) for index, (name, shape) in enumerate(shapes.items())}
    return made | {"output": made["embedding"].clone()}


@pytest.mark.parametrize(
    ("held", "seen"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_shares_equal_those_of_the_plain_digest(held: torch.dtype, seen: torch.dtype) -> None:
    mine = parameters(held)
    layout = sharded(mine)
    names = list(layout.tensors)
    keyed = {"dtypes": dict.fromkeys(names, seen), "units": common_units([layout]), "seed": 77}
    # Whole words where columns allow it, single elements of odd ones.
    assert keyed["units"] == {"gate": 4, "up": 4, "tied": 8}
    shares = digest_kernels.DigestTable(layout, mine, names, **keyed).shares()
    expected = digest(layout, mine, **keyed)
    assert shares.dtype == np.uint64
    assert {name: int(share) for name, share in zip(names, shares, strict=True)} == {"absent": 0} | expected


def test_shares_follow_the_memory_and_find_a_twin_that_differs() -> None:
    mine = parameters(torch.bfloat16, width=64)
    layout = sharded(mine)
    table = digest_kernels.DigestTable(layout, mine, list(layout.tensors))
    before = table.shares()
    mine["narrow"][3, 4] += 1
    after = table.shares()
    assert [name for name, a, b in zip(layout.tensors, before, after, strict=True) if a != b] == ["down"]
    mine["output"][2, 1] += 1
    with pytest.raises(WeightSyncFailed, match="tied: parameter output holds another copy of it that differs"):
        table.shares()


def test_compiling_ahead_changes_nothing_in_memory() -> None:
    mine = parameters(torch.bfloat16, width=64)
    before = {name: value.clone() for name, value in mine.items()}
    compile_kernels(sharded(mine), mine)
    assert all(torch.equal(value, before[name]) for name, value in mine.items())
