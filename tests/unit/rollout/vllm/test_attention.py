"""Where vLLM's decode steps share prompts. The kernels are tested in interpreted/shared_prompts.py, and on a GPU in
tests/gpu/test_shared_attention_cuda.py."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.base.speculative import SpeculativeConfig
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.launch import loader_settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_vllm_takes_the_kernels_in_the_place_of_flash_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from rlframe.rollout.vllm.attention import backend

    try:
        backend.register()
        chosen: Any = AttentionBackendEnum.FLASH_ATTN.get_class()
        assert chosen is backend.SharedPromptBackend
        assert (chosen.get_impl_cls(), chosen.get_builder_cls()) == (
            backend.SharedPromptImpl,
            backend.SharedPromptBuilder,
        )
        assert chosen.get_name() == "FLASH_ATTN"
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()


def builder(**changes: Any) -> Any:
    """A builder of metadata with vLLM's description of a group of layers."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from rlframe.rollout.vllm.attention.backend import SharedPromptBuilder

    spec = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    made = object.__new__(SharedPromptBuilder)
    attributes = {
        "kv_cache_spec": FullAttentionSpec(**spec | changes.pop("spec", {})),
        "headdim": 128,
        "dcp_world_size": 1,
        "rswa_window": None,
        "vllm_config": SimpleNamespace(speculative_config=changes.pop("speculative", None)),
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode[changes.pop("graphs", "FULL_DECODE_ONLY")]),
    }
    for name, value in (attributes | changes).items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("graphs", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_layers_with_attention_to_everything_share(graphs: str) -> None:
    assert builder(graphs=graphs)._is_plain()


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": {"sliding_window": 64}},
        {"spec": {"attention_chunk_size": 64}},
        {"spec": {"dtype": torch.float8_e4m3fn}},
        {"headdim": 96},
        {"dcp_world_size": 2},
        {"rswa_window": 8},
        {"speculative": SimpleNamespace(method="ngram")},
        {"graphs": "FULL"},
    ],
    ids=str,
)
def test_other_layers_are_left_to_flash_attention(changes: dict[str, Any]) -> None:
    assert not builder(**changes)._is_plain()


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, True), ({"head_size": 96}, False), ({"sliding_window": 8}, False)]
)
def test_keys_and_values_of_layers_that_do_not_share_are_left_to_flash_attention(
    changes: dict[str, Any], expected: bool
) -> None:
    from rlframe.rollout.vllm.attention.backend import SharedPromptImpl

    layer = {"num_heads": 4, "num_kv_heads": 2, "head_size": 128, "scale": 1.0, "kv_cache_dtype": "auto"}
    made = SharedPromptImpl(**{"alibi_slopes": None, "sliding_window": None} | layer | changes)
    # Phi-3's heads have 96 numbers, which no block of Triton has.
    assert made._is_plain is expected


@pytest.mark.parametrize(
    ("settings", "cuda", "told"),
    [
        ({}, True, None),
        ({}, False, False),
        ({"enable_prefix_caching": False}, True, False),
        ({"kv_cache_dtype": CacheFormat.FP8}, True, False),
        ({"speculative": SpeculativeConfig()}, True, False),
        ({"share_prompts": True}, True, True),
        ({"share_prompts": False}, True, False),
        ({"share_prompts": True}, False, False),
    ],
    ids=str,
)
def test_the_worker_is_told(settings: dict[str, Any], cuda: bool, told: bool | None) -> None:
    config = VllmConfig(max_model_len=128, max_num_seqs=8, **settings)
    assert loader_settings(config, None, cuda=cuda)["share_prompts"] is told


@pytest.mark.parametrize(
    ("asked", "capability", "expected"),
    [(None, (9, 0), True), (None, (8, 9), False), (None, (10, 0), False), (True, (8, 0), True), (False, (9, 0), False)],
)
def test_unless_told_otherwise_gpus_share_on_which_it_was_measured(
    asked: bool | None, capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlframe.rollout.vllm.worker import shares

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert shares(asked) is expected
