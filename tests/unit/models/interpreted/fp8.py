"""The GPU's quantisation, on the CPU by Triton's interpreter; run by tests/multiprocess/test_interpreted.py."""

import math

import pytest
import torch
from torch import Tensor

from rlframe.models.quantized.fp8 import Fp8
from rlframe.models.quantized.fp8_kernels import QuantizeTable

FP8 = Fp8((128, 128))


def weights() -> list[Tensor]:
    """A matrix of blocks of very different sizes, one of them zeros, and a part of a wider one."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(256, 384, generator=generator) * 2.0 ** torch.randint(-12, 1, (256, 384), generator=generator)
    first.view(2, 128, 3, 128).mul_(2.0 ** torch.tensor([[-60.0, 0.0, 60.0], [-119.0, 3.0, 1.0]])[:, None, :, None])
    first[:128, 128:256] = 0
    first[0, 0], first[1, 0] = -0.0, -(2.0**-90)
    # Triton's interpreter makes zeros of smaller ones, a GPU does not.
    first[first.abs() < 2.0**-126] = 0
    wide = torch.randn(128, 512, generator=generator)
    return [first.bfloat16(), wide.bfloat16()[:, 128:384]]


@pytest.mark.parametrize("powers_of_2", [False, True])
def test_a_launch_gives_the_bits_of_fp8(powers_of_2: bool) -> None:
    parts = []
    for weight in weights():
        values = torch.zeros(weight.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        parts.append((weight, values, torch.zeros(weight.shape[0] // 128, weight.shape[1] // 128)))
    QuantizeTable(parts, powers_of_2=powers_of_2).run()
    for weight, values, scales in parts:
        expected = FP8.quantize(weight, powers_of_2=powers_of_2)
        assert torch.equal(scales, expected[1])
        assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("powers_of_2", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_number_that_is_not_finite_is_no_number(bad: float, powers_of_2: bool) -> None:
    weight = weights()[0]
    weight[200, 130] = bad
    values = torch.zeros(weight.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(2, 3)
    QuantizeTable([(weight, values, scales)], powers_of_2=powers_of_2).run()
    expected = FP8.quantize(weight, powers_of_2=powers_of_2)
    for found in ((values, scales), expected):
        read = FP8.dequantize(found, torch.float32).view(2, 128, 3, 128)
        assert read.isnan().all((1, 3)).tolist() == read.isnan().any((1, 3)).tolist() == [[False] * 3, [0, 1, 0]]
    # The proof between steps compares the kernel's bits with those of torch.
    assert torch.equal(values.view(torch.uint8), expected[0].view(torch.uint8))


def test_every_number_of_16_bits_is_rounded_as_torch_rounds_it() -> None:
    """All finite bfloat16 numbers up to 448 in blocks whose scale is 1."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.float().abs() <= 448]
    filled = torch.full((-(-len(every) // 16384) * 128, 128), 448.0, dtype=torch.bfloat16)
    blocks = filled.view(-1, 16384)
    for index, part in enumerate(every.split(16000)):
        blocks[index, : len(part)] = part
    values = torch.zeros(filled.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.zeros(filled.shape[0] // 128, 1)
    QuantizeTable([(filled, values, scales)], powers_of_2=False).run()
    assert scales.eq(1).all()
    assert torch.equal(values.view(torch.uint8), filled.to(torch.float8_e4m3fn).view(torch.uint8))
