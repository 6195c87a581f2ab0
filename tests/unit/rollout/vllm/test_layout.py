"""vLLM's layouts, recorded without groups, devices or weights, against vLLM's own loading of the same rank."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.served.quantized import quantized_weights
from rlframe.rollout.vllm import layout as vllm_layout
from rlframe.rollout.vllm.config import has_tiles
from rlframe.utils.errors import ConfigError, WeightSyncFailed
from tests.tiny_models import make
from tests.unit.rollout.recorded import replay

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine  # vLLM is imported, and each kind of model inspected in a process of its own

DENSE = (
    "seed_oss", "mistral", "smollm3", "ministral3", "olmo2", "olmo3", "gemma3", "exaone4", "phi3", "granite",
)  # fmt: skip
# tp 4 has more ranks than the models have KV heads (2), and pads the vocabulary of 67.
CASES = [
    ("qwen3", 2, False),
    ("qwen2", 4, False),
    ("llama_scaled", 4, False),
    ("qwen3_moe", 1, False),
    ("qwen3_moe", 2, False),
    ("qwen3_moe", 4, True),
    ("kimi_k2", 2, False),
    ("glm4_moe_lite", 2, True),
    ("minimax_m2", 2, True),
    ("qwen3_next", 1, False),
    ("qwen3_next", 2, False),
    ("qwen3_next", 2, True),
    ("qwen3_5", 2, False),
    ("qwen3_5_moe", 2, True),
    *(pytest.param(name, 2, False, marks=pytest.mark.thorough) for name in DENSE),
]


@pytest.mark.parametrize(("name", "tp", "ep"), CASES, ids=str)
def test_the_recording_replays_what_vllm_loads(name: str, tp: int, ep: bool, tmp_path: Path) -> None:
    if name.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's file of Qwen3.5 imports it, also for texts")
    make(name, tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    layouts = vllm_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=tp, ep=ep)
    assert len(layouts) == tp
    for rank, layout in enumerate(layouts):
        loaded = load_with_vllm(tmp_path, checkpoint, rank, tp, ep)
        replayed = replay(layout, checkpoint)
        assert loaded.keys() == replayed.keys()
        for parameter, value in loaded.items():
            assert torch.equal(value, replayed[parameter]), f"rank {rank}: {parameter}"


@pytest.mark.thorough
def test_a_loader_that_rearranges_elements_is_refused(tmp_path: Path) -> None:
    make("llama4", tmp_path)
    # vLLM reorders the rows of each head for its rotary embedding. The weights are reloaded then.
    with pytest.raises(WeightSyncFailed, match=r"q_proj.weight uses aten.clone.default"):
        vllm_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2, ep=False)


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX, without which vLLM makes no layers in FP8 on it")
@pytest.mark.parametrize(("name", "tp", "ep"), [("qwen3", 2, False), ("qwen3_moe", 2, False), ("qwen3_moe", 2, True)])
def test_the_recording_of_fp8_blocks_replays_what_vllm_loads(name: str, tp: int, ep: bool, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    make(name, tmp_path, **wide, **({"moe_intermediate_size": 256} if "moe" in name else {}))
    fp8, weights = EngineFormat.FP8_BLOCK, load_file(tmp_path / "model.safetensors")
    checkpoint = dict(quantized_weights(weights.items(), fp8, dtype=torch.bfloat16, device="cpu"))
    layouts = vllm_layout.engine_layouts(tmp_path, dtype=torch.bfloat16, tp=tp, ep=ep, engine_format=fp8)
    for rank, layout in enumerate(layouts):
        loaded = load_with_vllm(tmp_path, checkpoint, rank, tp, ep, dtype=torch.bfloat16, engine_format=fp8)
        replayed = replay(layout, {name: value.bfloat16().float() for name, value in checkpoint.items()})
        assert loaded.keys() == replayed.keys()
        assert {str(value.dtype) for value in loaded.values()} == {
            "torch.bfloat16", "torch.float32", "torch.float8_e4m3fn",
        }  # fmt: skip
        for parameter, value in loaded.items():
            assert torch.equal(value.bfloat16().float(), replayed[parameter]), f"rank {rank}: {parameter}"


def load_with_vllm(
    folder: Path,
    checkpoint: dict[str, torch.Tensor],
    rank: int,
    tp: int,
    ep: bool,
    *,
    dtype: torch.dtype = torch.float32,
    engine_format: EngineFormat = EngineFormat.NONE,
) -> dict[str, torch.Tensor]:
    """The parameters of one rank, in memory, after vLLM has loaded the tensors itself."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = copy.deepcopy(vllm_layout._config(folder, dtype=dtype, tp=tp, ep=ep, engine_format=engine_format))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with vllm_layout._stand_in_groups(rank, tp), set_current_vllm_config(config), torch.no_grad():
            model: Any = initialize_model(config)
            model.load_weights(checkpoint.items())
    finally:
        torch.set_default_dtype(before)
    return {name: value.detach() for name, value in vllm_layout.weights(model).items()}


def test_a_process_with_an_engine_is_not_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    make("qwen3", tmp_path)
    engine = object()
    monkeypatch.setattr(parallel_state, "_TP", engine)
    with pytest.raises(ConfigError, match="an engine runs in this process"):
        vllm_layout.engine_layouts(tmp_path, dtype=torch.float32, tp=2)
    assert parallel_state._TP is engine


def test_what_vllm_cannot_split_is_named_before_it_is_tried(tmp_path: Path) -> None:
    make("qwen3_moe", tmp_path)
    family = load_family(tmp_path)
    architecture = family.architecture(read_config(tmp_path))
    assert vllm_layout.faults(architecture, tp=4, ep=True) == []
    # 4 heads and 2 KV heads; 8 experts of width 48.
    assert list(map(str, vllm_layout.faults(architecture, tp=5, ep=True))) == [
        "rollout.name=vllm: tp 5 must divide num_attention_heads 4 of qwen3_moe",
        "rollout.name=vllm: tp 5 must divide num_kv_heads 2 of qwen3_moe or be a multiple of it",
    ]
