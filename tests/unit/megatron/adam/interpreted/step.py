"""AdamW's kernels by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import math

import pytest
import torch
from torch import Tensor

from rlframe.megatron.adam import kernels
from rlframe.megatron.adam.table import Kind, Shard, Table

SIZES = [5, 64, 1, 130, 0, 33]
"""Elements of tensors: fewer and more than a program updates at once, and in all."""
GROUP = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"BLOCK": 16, "BLOCKS": 2, "CHUNK": 32}.items():
        monkeypatch.setattr(kernels, name, size)


def split(main: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 number as the nearest bfloat16, ties away from zero, and the bits that it lacks."""
    lower = main.view(torch.int16)[..., ::2].contiguous()
    upper = main.view(torch.int16)[..., 1::2] + (lower < 0)
    return upper.to(torch.int16).contiguous().view(BF16), lower


def joined(weight: Tensor, lower: Tensor) -> Tensor:
    upper = weight.view(torch.int16) - (lower < 0).to(torch.int16)
    return torch.stack([lower, upper], -1).flatten().view(F32)


def made(kind: Kind, *, first: int = 0) -> tuple[Table, list[Tensor]]:
    """A table of random tensors, and their main weights in float32.

    Args:
        first: element of their memory with which they begin.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(first + size, generator=generator).to(dtype)[first:]

    shards, mains = [], []
    for index, size in enumerate(SIZES):
        main, gradient = drawn(size, F32), drawn(size, kind.gradients)
        state = {"exp_avg": drawn(size, kind.moments), "exp_avg_sq": drawn(size, kind.moments).square()}
        mains.append(main.clone())
        weight = main.clone() if kind.weights == F32 else main.to(kind.weights)
        if kind.remainders:
            weight, main = split(main)
        shards.append(Shard(gradient, main if kind.weights == F32 else weight, state, main, index != 3))
    table = Table(kind, shards)
    table.look()
    return table, mains


def by_hand(shard: Shard, main: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and moments after a step, in float64."""
    gradient = shard.gradient.double() * scale
    first = 0.9 * shard.state["exp_avg"].double() + 0.1 * gradient
    second = 0.95 * shard.state["exp_avg_sq"].double() + 0.05 * gradient.square()
    size = first / (1 - 0.9**3) / ((second / (1 - 0.95**3)).sqrt() + 1e-8)
    return main.double() - 0.01 * (size + 0.1 * main.double()), first, second


KINDS = [
    Kind(0, F32, F32, F32, remainders=False),
    Kind(0, F32, BF16, F32, remainders=False),
    Kind(0, BF16, BF16, F32, remainders=False),
    Kind(0, F32, BF16, F32, remainders=True),
    Kind(0, F32, BF16, BF16, remainders=True),
]


@pytest.mark.parametrize(("kind", "first"), [(KINDS[0], 1), *((kind, 0) for kind in KINDS)], ids=str)
def test_a_step_is_adamws(kind: Kind, first: int) -> None:
    table, mains = made(kind, first=first)
    expected = [by_hand(shard, main, 0.5) for shard, main in zip(table.shards, mains, strict=True)]
    table.update(GROUP, 0.5)
    for shard, (weight, first_moment, second_moment) in zip(table.shards, expected, strict=True):
        main = joined(shard.weight, shard.main) if kind.remainders else shard.main
        torch.testing.assert_close(main.double(), weight, atol=1e-6, rtol=1e-6)
        # Triton's interpreter cuts off where a GPU rounds.
        near = {"atol": 1e-6, "rtol": 2**-7 if kind.moments == BF16 else 1e-6}
        torch.testing.assert_close(shard.state["exp_avg"].double(), first_moment, **near)
        torch.testing.assert_close(shard.state["exp_avg_sq"].double(), second_moment, **near)
        if kind.weights == BF16:
            torch.testing.assert_close(shard.weight.double(), weight, atol=0, rtol=2**-7)


def test_a_step_by_hand() -> None:
    # t = 1 and no moments: m = 0.1 g, v = 0.05 g^2, and both corrections undo the factors, so that w moves by lr.
    shard = Shard(torch.tensor([4.0]), torch.tensor([2.0]), {}, torch.tensor([2.0]), True)
    shard.state.update(exp_avg=torch.zeros(1), exp_avg_sq=torch.zeros(1))
    table = Table(KINDS[0], [shard])
    table.look()
    table.update(GROUP | {"step": 1}, 0.25)
    # The gradient is 1 after clipping: 2 - 0.01 (1 + 0.1 * 2).
    assert shard.main.item() == pytest.approx(1.988, abs=1e-6)
    assert shard.state["exp_avg"].item() == pytest.approx(0.1, abs=1e-7)
    assert shard.state["exp_avg_sq"].item() == pytest.approx(0.05, abs=1e-7)


def test_bits_that_weights_lack_are_kept() -> None:
    whole, _ = made(KINDS[1])
    apart, mains = made(KINDS[3])
    for shard, main in zip(apart.shards, mains, strict=True):
        assert torch.equal(joined(shard.weight, shard.main), main)
    for step in (3, 4, 5):
        whole.update(GROUP | {"step": step}, 1.0)
        apart.update(GROUP | {"step": step}, 1.0)
    for one, other in zip(whole.shards, apart.shards, strict=True):
        assert torch.equal(joined(other.weight, other.main), one.main)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("gradients", [F32, BF16])
def test_the_norm_is_of_gradients_that_count(gradients: torch.dtype, first: int) -> None:
    table, _ = made(KINDS[0]._replace(gradients=gradients), first=first)
    exact = sum(float(shard.gradient.double().square().sum()) for shard in table.shards if shard.counts)
    assert float(table.squares()) == pytest.approx(exact, rel=1e-6)
    table.shards[3].gradient.fill_(math.inf)
    assert float(table.squares()) == pytest.approx(exact, rel=1e-6)
    table.shards[1].gradient[7] = math.nan
    assert math.isnan(float(table.squares()))


def test_tensors_that_moved_are_found() -> None:
    table, mains = made(KINDS[0])
    table.update(GROUP, 1.0)
    for shard in table.shards:
        # As a sleep leaves them: the same tensor over other memory.
        shard.main.set_(shard.main.clone())
    table.look()
    again, _ = made(KINDS[0])
    again.update(GROUP, 1.0)
    for one in (table, again):
        one.update(GROUP | {"step": 4}, 1.0)
    for one, other, main in zip(table.shards, again.shards, mains, strict=True):
        assert torch.equal(one.main, other.main) and (not len(main) or not torch.equal(one.main, main))
