"""What lies between two attentions of a decode step, by one kernel on a GPU, beside its formula in float64."""

import importlib.util
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rlframe.rollout.vllm.decode.between.launch import is_available, kernel_for
from tests.unit.rollout.vllm.interpreted.formulas import between_attentions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_available(), reason="cuda-bindings is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
EPSILON = 1e-6


class Shape(NamedTuple):
    hidden: int
    heads: int
    inner: int
    columns: int


SMALL = Shape(1024, 2048, 3072, 4096)
MIDDLE = Shape(2048, 2048, 6144, 4096)
UNEVEN = Shape(2560, 4096, 9728, 6144)
"""Its tiles are not a multiple of any GPU's multiprocessors."""
WIDE = Shape(4096, 4096, 12288, 6144)


def case(shape: Shape, rows: int, *, last: bool = False, bias: bool = False) -> list[Tensor | None]:
    """Arguments of the operation but the last."""
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device="cuda", generator=generator) * scale).bfloat16()

    hidden, heads, inner, columns = shape
    # Rows of attention lie apart, as those of a part of a tensor.
    attended = numbers(rows, heads + 64)[:, :heads]
    arguments: list[Tensor | None] = [attended, numbers(rows, hidden), numbers(hidden, heads, scale=heads**-0.5)]
    arguments += [1 + numbers(hidden, scale=0.1), numbers(2 * inner, hidden, scale=hidden**-0.5)]
    arguments += [numbers(hidden, inner, scale=inner**-0.5)]
    if last:
        return [*arguments, None, None, None]
    arguments += [1 + numbers(hidden, scale=0.1), numbers(columns, hidden, scale=hidden**-0.5)]
    return [*arguments, numbers(columns) if bias else None]


@pytest.fixture(autouse=True)
def operation() -> Iterator[None]:
    import rlframe.rollout.vllm.decode.between.operation  # noqa: F401 - registers it

    yield


@pytest.mark.parametrize("shape", [SMALL, MIDDLE, UNEVEN, WIDE])
# 9 and more are left to several kernels.
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 300])
@pytest.mark.parametrize(("last", "bias"), [(False, False), (False, True), (True, False)])
def test_the_operation_computes_the_formula(shape: Shape, rows: int, last: bool, bias: bool) -> None:
    arguments = case(shape, rows, last=last, bias=bias)
    found = torch.ops.rlframe.between(*arguments, EPSILON)
    wide = [None if each is None else each.double() for each in arguments]
    formula: Any = between_attentions
    for got, wanted in zip(found, formula(*wide, EPSILON), strict=True):
        # bfloat16 has 8 bits: roundings of 5 steps one after the other.
        assert (got.double() - wanted).norm() / wanted.norm() < 8e-3
        torch.testing.assert_close(got.double(), wanted, atol=0.06, rtol=0.03)


@pytest.mark.parametrize("shape", [MIDDLE, UNEVEN])
@pytest.mark.parametrize("rows", [1, 8])
def test_what_is_computed_again_is_the_same(shape: Shape, rows: int) -> None:
    """Copies to slots that were not read yet made it differ in one of four launches."""
    arguments, cold = case(shape, rows), torch.zeros(1 << 26, device="cuda")
    expected = [each.clone() for each in torch.ops.rlframe.between(*arguments, EPSILON)]
    for number in range(150):
        if number % 3 == 0:
            cold.add_(1)
        for got, wanted in zip(torch.ops.rlframe.between(*arguments, EPSILON), expected, strict=True):
            assert torch.equal(got, wanted)


def test_a_captured_chain_reads_what_the_kernel_ahead_has_written() -> None:
    import rlframe.rollout.vllm.decode.few_rows  # noqa: F401 - has the operation

    layers = [case(MIDDLE._replace(columns=2048), 8) for _ in range(6)]

    def chain() -> Any:
        attended, residual, *_ = layers[0]
        for _, _, *weights in layers * 4:
            attended, residual = torch.ops.rlframe.between(attended, residual, *weights, EPSILON)
            attended = torch.ops.rlframe.linear(attended, weights[0], None)
        return attended

    expected = chain().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(100):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    assert expected.isfinite().all() and expected.any()


def test_the_counter_is_not_in_memory_that_sleeping_engines_give_up() -> None:
    torch.zeros(1, device="cuda")
    kernel = kernel_for(torch.device("cuda", 0), MIDDLE.hidden)
    for segment in torch.cuda.memory_snapshot():
        assert not segment["address"] <= kernel.arrived < segment["address"] + segment["total_size"]
