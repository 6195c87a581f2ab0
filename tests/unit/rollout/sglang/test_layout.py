"""The layouts of SGLang's ranks, recorded without an engine."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.served.quantized import quantized_weights
from rlframe.rollout.sglang import layout as sglang_layout
from rlframe.tools import plan_sync
from rlframe.utils.errors import ConfigError
from rlframe.weight_sync.layout.boxes import Box, matrix_shape
from rlframe.weight_sync.layout.memory import MemoryLayout
from rlframe.weight_sync.plan.planner import Kind
from tests.tiny_models import make as make_model
from tests.unit.rollout.recorded import replay

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
    pytest.mark.engine,
    pytest.mark.xdist_group("sglang layouts"),
]

# tp 4 has more ranks than the models have KV heads (2), and pads the vocabulary of 67.
SPLITS = [("qwen3", 2, False), ("qwen2", 4, False), ("llama_scaled", 4, False), ("qwen3_moe", 2, False)]
SPLITS += [("qwen3_moe", 4, True), ("mixtral", 2, True)]


@pytest.mark.parametrize(("name", "tp", "ep"), SPLITS, ids=str)
def test_the_recording_replays_what_sglang_loads(
    name: str, tp: int, ep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(name, tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    layouts = sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=tp, ep=ep)
    assert len(layouts) == tp
    arguments = sglang_layout._arguments(tmp_path, dtype=torch.float32, tp=tp, ep=ep)
    # The same model, with memory.
    monkeypatch.setattr(sglang_layout, "without_memory", lambda dtype: nullcontext())
    for rank, layout in enumerate(layouts):
        with sglang_layout._play(rank, arguments) as model, torch.no_grad():
            model.load_weights(checkpoint.items())
            loaded = dict(model.named_parameters())
        replayed = replay(layout, checkpoint)
        assert loaded.keys() == replayed.keys()
        for parameter, value in loaded.items():
            assert torch.equal(value, replayed[parameter]), f"rank {rank}: {parameter}"
    for tensor, shape in layouts[0].tensors.items():
        assert (copies(layouts, tensor, shape) > 0).all(), f"{tensor} is nowhere in part"


@pytest.mark.parametrize(("name", "tp", "ep"), [("qwen3", 2, False), ("qwen3_moe", 2, False), ("qwen3_moe", 2, True)])
def test_the_recording_of_fp8_blocks_replays_what_sglang_loads(
    name: str, tp: int, ep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    make_model(name, tmp_path, **wide, **({"moe_intermediate_size": 256} if "moe" in name else {}))
    fp8, weights = EngineFormat.FP8_BLOCK, load_file(tmp_path / "model.safetensors")
    checkpoint = dict(quantized_weights(weights.items(), fp8, dtype=torch.bfloat16, device="cpu"))
    split: dict[str, Any] = {"dtype": torch.bfloat16, "tp": tp, "ep": ep, "engine_format": fp8}
    layouts = sglang_layout.engine_layouts(tmp_path, **split)
    monkeypatch.setattr(sglang_layout, "without_memory", default_dtype)
    for rank, layout in enumerate(layouts):
        with sglang_layout._play(rank, sglang_layout._arguments(tmp_path, **split)) as model, torch.no_grad():
            model.load_weights(checkpoint.items())
            loaded = dict(model.named_parameters())
        replayed = replay(layout, {name: value.bfloat16().float() for name, value in checkpoint.items()})
        assert loaded.keys() == replayed.keys()
        assert {value.dtype for value in loaded.values()} == {torch.bfloat16, torch.float32, torch.float8_e4m3fn}
        for parameter, value in loaded.items():
            assert torch.equal(value.bfloat16().float(), replayed[parameter]), f"rank {rank}: {parameter}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Has models that are made inside in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def copies(layouts: list[MemoryLayout], tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """How many ranks hold each element, as a matrix."""
    counts = torch.zeros(matrix_shape(shape), dtype=torch.int64)
    for layout in layouts:
        for box in layout.boxes.get(tensor, ()):
            counts[box.row : box.row + box.rows, box.col : box.col + box.cols] += 1
    return counts


def test_the_second_of_two_ranks_holds_the_second_half_of_everything(tmp_path: Path) -> None:
    """4 heads and 2 KV heads of width 32, hidden 64, 8 experts of width 48, vocabulary 67 padded to 128."""
    make_model("qwen3_moe", tmp_path)
    sliced, whole = (
        sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2, ep=ep)[1] for ep in (False, True)
    )
    layer, qkv = "model.layers.1.", "model.layers.1.self_attn.qkv_proj.weight"
    w13, w2 = (f"{layer}mlp.experts.{name}_weight" for name in ("w13", "w2"))
    attention = [
        # 64 of the 128 rows of queries, and 32 of the 64 of keys and of values, follow each other in [128, 64].
        Box(f"{layer}self_attn.q_proj.weight", 64, 64, 0, 64, qkv, 0, 64, 1),
        Box(f"{layer}self_attn.k_proj.weight", 32, 32, 0, 64, qkv, 64 * 64, 64, 1),
        Box(f"{layer}self_attn.v_proj.weight", 32, 32, 0, 64, qkv, 96 * 64, 64, 1),
        # The columns of the second half's heads.
        Box(f"{layer}self_attn.o_proj.weight", 0, 64, 64, 64, f"{layer}self_attn.o_proj.weight", 0, 64, 1),
        # Of rows 64 to 127 the vocabulary has three.
        Box("model.embed_tokens.weight", 64, 3, 0, 64, "model.embed_tokens.weight", 0, 64, 1),
    ]
    expert = f"{layer}mlp.experts.5"
    # Expert 5 of [8, 2 * 24, 64] and of [8, 64, 24]: the second half of its 48 rows, or columns.
    halves = [
        Box(f"{expert}.gate_proj.weight", 24, 24, 0, 64, w13, 5 * 48 * 64, 64, 1),
        Box(f"{expert}.up_proj.weight", 24, 24, 0, 64, w13, (5 * 48 + 24) * 64, 64, 1),
        Box(f"{expert}.down_proj.weight", 0, 64, 24, 24, w2, 5 * 64 * 24, 24, 1),
    ]
    # Rank 1 has experts 4 to 7, so 5 is the second of [4, 2 * 48, 64] and of [4, 64, 48].
    wholes = [
        Box(f"{expert}.gate_proj.weight", 0, 48, 0, 64, w13, 96 * 64, 64, 1),
        Box(f"{expert}.up_proj.weight", 0, 48, 0, 64, w13, (96 + 48) * 64, 64, 1),
        Box(f"{expert}.down_proj.weight", 0, 64, 0, 48, w2, 64 * 48, 48, 1),
    ]
    for layout, boxes in ((sliced, attention + halves), (whole, attention + wholes)):
        assert [layout.boxes[box.tensor] for box in boxes] == [(box,) for box in boxes]
    assert f"{layer}mlp.experts.3.up_proj.weight" in sliced.boxes.keys() - whole.boxes.keys()


def test_plan_sync_plans_into_sglang(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    answer = plan_sync.solve(
        plan_sync.Case(model=str(tmp_path), train="d4e4", engine="sglang", tp=4, ep=True, dtype="float32")
    )
    # Trainer and engine share the experts out alike, and the trainer's ranks have everything else.
    assert not answer.fallback
    assert set(answer.plan.kind_bytes) == {Kind.DEVICE}


def test_a_process_with_an_engine_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state

    make_model("qwen3", tmp_path)
    engine = object()
    monkeypatch.setattr(parallel_state, "_TP", engine)
    with pytest.raises(ConfigError, match="an engine runs in this process"):
        sglang_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2)
    assert parallel_state._TP is engine


@pytest.mark.parametrize("fallback", [True, False])
def test_attention_writes_its_cache_itself_where_the_rotary_kernel_cannot(fallback: bool):
    from rlframe.rollout.sglang.worker import write_cache_apart

    attention: Any = torch.nn.Module()
    attention.compatible_with_fused_kv_buffer = True
    attention.rotary_emb = torch.nn.Module()
    attention.rotary_emb.use_fallback_kernel = fallback
    write_cache_apart(torch.nn.Sequential(torch.nn.Linear(2, 2), attention))
    assert attention.compatible_with_fused_kv_buffer is not fallback
