"""Products of few rows on a GPU: alone, and in a captured chain in which each begins before the one ahead has ended."""

import importlib.util

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(
    ("columns", "depth"), [(4096, 2048), (2048, 2048), (2048, 6144), (12288, 2048), (1000, 768), (1000, 4608)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_torchs(rows: int, columns: int, depth: int, with_bias: bool) -> None:
    from rlframe.rollout.vllm.decode import few_rows

    generator = torch.Generator("cuda").manual_seed(0)
    weight, x = (torch.randn(size, depth, device="cuda", generator=generator).bfloat16() for size in (columns, rows))
    bias = torch.randn(columns, device="cuda", generator=generator).bfloat16() if with_bias else None
    found = torch.ops.rlframe.linear(x, weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=2**-8)
    alone = few_rows.multiply(x, weight, bias, few_rows.tiles_for(columns, processors=132), dependent=False)
    assert torch.equal(found, alone)


def test_a_captured_chain_reads_what_the_kernel_ahead_has_written() -> None:
    import rlframe.rollout.vllm.decode.few_rows  # noqa: F401 - has the operation

    generator = torch.Generator("cuda").manual_seed(0)
    layers = [torch.randn(2048, 2048, device="cuda", generator=generator).bfloat16() / 45 for _ in range(60)]
    begin = torch.randn(8, 2048, device="cuda", generator=generator).bfloat16()

    def chain() -> torch.Tensor:
        x = begin
        for number, weight in enumerate(layers):
            x = torch.ops.rlframe.linear(x, weight, None)
            if number % 3 == 0:
                x = x * 1.0
        return x

    expected = chain().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(200):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
    assert expected.isfinite().all()
