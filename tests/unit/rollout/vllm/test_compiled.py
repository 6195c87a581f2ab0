"""Kernels of an engine's decode steps, compiled for Hopper without a GPU: Triton brings NVIDIA's assembler."""

import importlib.util
from typing import Any

import pytest

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]

ROWS = {"slots": "*i32", "temperatures": "*fp32", "lengths": "*i32", "seeds": "*i64", "least": "*i32", "counts": "*i32"}
RESULTS = {"forbidden": "*i32", "sums": "*fp32", "best": "*i64", "tokens": "*i64", "logprobs": "*fp32"}
PLAN = {"tables": "*i32", "order": "*i32", "items": "*i32", "count": "*i32", "partial": "*fp32", "logsumexps": "*fp32"}
JOINED = {"partial": "*fp32", "logsumexps": "*fp32", "parts": "*i32", "out": "*bf16"}
HALVES = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "scale": "fp32"}


def compiled(module: str, kernel: str, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """The kernel for compute capability 9.0. Arguments that have no type are int32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"rlframe.rollout.vllm.{module}"), kernel)
    kinds = {name: types.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    values = {(function.arg_names.index(name),): value for name, value in constants.items()}
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(ASTSource(function, kinds, values), target=target, options=options)


@pytest.mark.parametrize(("logits", "forbids", "divides"), [("*bf16", True, False), ("*fp32", False, True)])
def test_one_pass(logits: str, forbids: bool, divides: bool) -> None:
    types = ROWS | RESULTS | {"logits": logits}
    constants = {"LANES": 512, "FORBIDS": forbids, "DIVIDES": divides}
    read = compiled("sampling.one_pass", "_read", types, constants, num_warps=4)
    assert read.asm["cubin"]
    chosen = compiled("sampling.one_pass", "_choose", types, {"DIVIDES": divides, "PARTS": 128}, num_warps=1)
    assert chosen.asm["cubin"]


@pytest.mark.parametrize(("size", "group"), [(128, 2), (256, 2), (128, 8), (128, 32), (128, 64)])
def test_shared_attention(size: int, group: int) -> None:
    from rlframe.rollout.vllm.attention.kernels import joining_for, tokens_and_warps
    from rlframe.rollout.vllm.attention.plan import queries_of_item, tuning_for

    tuning = tuning_for(group)
    (tokens, warps), queries = tokens_and_warps(tuning, size), queries_of_item(group)
    constants = {"GROUP": group, "PAGE": 16, "QUERIES": queries, "SIZE": size, "TOKENS": tokens, "DEPENDENT": True}
    found = compiled(
        "attention.kernels", "_attend", PLAN | HALVES, constants, num_warps=warps, num_stages=tuning.stages
    )
    # A processor of an H200 has 227 KiB of shared memory for a program.
    assert found.asm["cubin"] and found.metadata.shared <= 227 << 10
    for rows in (1, 256):
        joining = joining_for(rows, 8, group, size)
        constants = {"GROUP": group, "HEADS": group, "SIZE": size, "PARTS": joining.parts, "DEPENDENT": True}
        constants["COLUMNS"] = joining.columns
        joined = compiled("attention.kernels", "_join", JOINED, constants, num_warps=joining.warps)
        assert joined.asm["cubin"]


@pytest.mark.parametrize(("columns", "depth"), [(2048, 2048), (2048, 6144), (12288, 2048)])
def test_few_rows(columns: int, depth: int) -> None:
    from rlframe.rollout.vllm.decode.few_rows import ROWS, SMALLEST, tiles_for

    tiles = tiles_for(columns, processors=132)
    constants = {"ROWS": ROWS, "DEPTH": depth, "COLUMNS": tiles.columns, "AT_ONCE": tiles.depth, "PARTS": tiles.parts}
    constants |= {"STAGES": tiles.stages, "BIAS": True, "DEPENDENT": True, "AHEAD": SMALLEST}
    types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    found = compiled("decode.few_rows", "_multiply", types, constants, num_warps=tiles.warps, launch_pdl=True)
    words = ("prefetch.global", "griddepcontrol.wait", "griddepcontrol.launch")
    order = [found.asm["ptx"].index(word) for word in words]
    # The weights are asked for before the wait. The next kernel may begin after it.
    assert order == sorted(order)
    assert found.metadata.shared <= 227 << 10


@pytest.mark.parametrize("normed", [False, True])
def test_rotary(normed: bool) -> None:
    norms = dict.fromkeys(("query_norm", "key_norm"))
    constants: dict[str, Any] = {"HEADS": 4, "SIZE": 128, "HALF": 64, "NORMED": normed, "DEPENDENT": True}
    types = dict.fromkeys(("qkv", "angles", "query", "key"), "*bf16") | {"positions": "*i64", "epsilon": "fp32"}
    types |= dict.fromkeys(norms, "*bf16") if normed else {}
    found = compiled("decode.rotary", "_rotate", types, constants | ({} if normed else norms), num_warps=1)
    assert found.asm["cubin"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_layers_without_quantisation_ask_for_products_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.model_executor.layers import utils

    from rlframe.rollout.vllm.decode import few_rows

    class Calls(TorchDispatchMode):
        """The operations that were called."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    def asked(columns: int, depth: int, dtype: torch.dtype) -> bool:
        names.clear()
        x, weight = (torch.empty(size, depth, dtype=dtype, device="meta") for size in (8, columns))
        with Calls():
            found = utils.dispatch_unquantized_gemm()(torch.nn.Module(), x, weight)
        assert found.shape == (8, columns) and found.dtype == dtype
        return "rlframe.linear.default" in names

    names: list[str] = []
    monkeypatch.setattr(utils, "default_unquantized_gemm", utils.default_unquantized_gemm)
    # On this machine vLLM chooses the function of CPUs.
    monkeypatch.setattr(utils, "dispatch_unquantized_gemm", lambda: utils.default_unquantized_gemm)
    assert not asked(2048, 512, torch.bfloat16)
    few_rows.install()
    few_rows.install()
    assert asked(2048, 512, torch.bfloat16)
    # Those that the kernel cannot compute, and those that last so long that their beginning does not count.
    assert not asked(2048, 384, torch.bfloat16) and not asked(2048, 512, torch.float32)
    assert not asked(few_rows.MOST_COLUMNS + 1, 512, torch.bfloat16)
