from typing import Any

import pytest

from rlframe.models.families.base import Architecture
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.base.speculative import SpeculativeConfig
from rlframe.rollout.vllm.config import OWN_OPTIONS, REFUSED_OPTIONS, VllmConfig, slot_rank
from rlframe.rollout.vllm.launch import CPU_CACHE_BYTES, LEAST_CLAIM, compilation_options, memory_options


def architecture(**changes: Any) -> Architecture:
    values = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_layers": 2,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_hidden_size": 96,
        "vocab_size": 67,
        "max_positions": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "moe_layers": (False, False),
    }
    return Architecture(**(values | changes))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be at least 1, got 0"),
        (
            {"share_prompts": True, "enable_prefix_caching": False},
            "share_prompts has no effect with enable_prefix_caching=false",
        ),
        (
            {"share_prompts": True, "kv_cache_dtype": CacheFormat.FP8},
            "share_prompts has no effect with kv_cache_dtype=fp8",
        ),
        (
            {"share_prompts": True, "speculative": SpeculativeConfig()},
            "share_prompts has no effect with speculative",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be at most 1, got 1.5"),
        ({"max_model_len": 1}, "max_model_len must be at least 2, got 1"),
        ({"sleep_level": 3}, "sleep_level must be at most 2, got 3"),
        (
            {"kv_cache_gb": 1.0, "gpu_memory_utilization": 0.4},
            "kv_cache_gb and gpu_memory_utilization both decide the size of the cache",
        ),
        ({"expert_parallel": True}, "expert_parallel needs tp above 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        (
            {"compile": False, "engine_options": {"compilation_config": {"mode": 3}}},
            "compile false contradicts engine_options.compilation_config.mode=3",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict, message: str):
    with pytest.raises(ValueError, match=message):
        VllmConfig(**values)


@pytest.mark.parametrize("name", sorted(OWN_OPTIONS | REFUSED_OPTIONS.keys()))
def test_what_the_engine_sets_itself_or_would_be_wrong_with_is_no_further_option(name: str):
    with pytest.raises(ValueError, match=f"engine_options must not hold {name}"):
        VllmConfig(engine_options={name: 1})


def test_an_engine_takes_tp_devices_and_as_long_sequences_as_it_says():
    config = VllmConfig(tp=4, max_model_len=96)
    assert (config.devices_per_engine, config.sequence_tokens) == (4, 96)
    assert (VllmConfig().devices_per_engine, VllmConfig().sequence_tokens) == (1, None)


@pytest.mark.parametrize(
    ("values", "model", "faults"),
    [
        ({"tp": 4}, {}, []),
        ({"tp": 8}, {}, []),
        ({"tp": 3}, {}, ["tp 3 must divide num_attention_heads 8", "tp 3 must divide num_kv_heads 2"]),
        ({"max_model_len": 129}, {}, ["max_model_len=129 must not exceed the model's 128 positions"]),
        ({"tp": 2, "expert_parallel": True}, {}, ["needs experts, and qwen3 is dense"]),
        ({"tp": 2, "expert_parallel": True}, {"num_experts": 8, "moe_layers": (True, True)}, []),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_starts(values: dict, model: dict, faults: list[str]):
    found = list(map(str, VllmConfig(**values).faults(architecture(**model))))
    assert len(found) == len(faults)
    for one, text in zip(found, faults, strict=True):
        assert one.startswith("rollout.") and text in one


def test_experts_whole_on_a_rank_are_refused_on_a_cpu():
    """vLLM 0.32 dies of a segmentation fault there, at the first request."""
    model = architecture(num_experts=8, moe_layers=(True, True))
    (fault,) = VllmConfig(tp=2, expert_parallel=True).cpu_faults(model, trained="float32")
    assert str(fault).startswith("rollout.expert_parallel must be false on a CPU")
    assert list(VllmConfig(tp=2).cpu_faults(model, trained="float32")) == []


@pytest.mark.parametrize("size", [16, 24, 144])
def test_heads_without_a_kernel_on_a_cpu_are_refused(size: int) -> None:
    """vLLM 0.32 starts, and its core ends at the first request."""
    (fault,) = VllmConfig().cpu_faults(architecture(head_dim=size), trained="float32")
    assert str(fault).startswith(f"rollout.name must be another engine for qwen3 with heads of {size} numbers on a CPU")


def test_an_engine_with_a_cache_of_a_given_size_asks_for_no_part_of_the_device():
    of = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": None}
    plain = {"kv_cache_dtype": "auto"}
    assert memory_options(VllmConfig(), cuda=True) == of | plain
    of = {"enable_sleep_mode": False, "gpu_memory_utilization": LEAST_CLAIM, "kv_cache_memory_bytes": 4_000_000_000}
    of |= plain
    assert memory_options(VllmConfig(kv_cache_gb=4, sleep_level=0), cuda=True) == of
    assert memory_options(VllmConfig(), cuda=False)["kv_cache_memory_bytes"] == CPU_CACHE_BYTES
    assert memory_options(VllmConfig(kv_cache_gb=0.5), cuda=False)["kv_cache_memory_bytes"] == 500_000_000


def test_vllm_keeps_adapters_in_memory_of_the_next_rank_that_it_knows() -> None:
    assert [slot_rank(rank) for rank in (1, 4, 8, 17, 33, 512)] == [1, 8, 8, 32, 64, 512]


@pytest.mark.parametrize(
    ("changes", "tensor", "rank", "message"),
    [
        ({}, "q_proj", 32, None),
        ({}, "down_proj", 513, "train.lora.rank must be at most 512 with weight_sync.lora=adapter"),
        ({}, "in_proj_ba", 8, "must be merged with adapters of model.layers.0.mlp.in_proj_ba.weight"),
        (
            {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 48, "moe_layers": (True, True)},
            "q_proj",
            8,
            "weight_sync.lora must be merged for qwen3, which has experts",
        ),
    ],
)
def test_adapters_that_vllm_cannot_hold_are_refused(
    changes: dict[str, Any], tensor: str, rank: int, message: str | None
) -> None:
    found = VllmConfig().adapter_faults(architecture(**changes), [f"model.layers.0.mlp.{tensor}.weight"], rank=rank)
    texts = [str(fault) for fault in found]
    assert texts == [] if message is None else message in texts[0]


def test_sizes_of_cuda_graphs_do_not_bring_inductor_back() -> None:
    sizes = {"cudagraph_capture_sizes": [1, 8]}
    plain = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    assert compilation_options(VllmConfig(), cuda=True) == {"compilation_config": plain}
    given = VllmConfig(engine_options={"compilation_config": sizes})
    assert compilation_options(given, cuda=True) == {"compilation_config": plain | sizes}
    assert compilation_options(given, cuda=False)["compilation_config"]["cudagraph_mode"] == "NONE"


@pytest.mark.parametrize(
    "settings",
    [
        {"compile": True, "engine_options": {"compilation_config": {"mode": 3}}},
        {"enforce_eager": True},
        {"engine_options": {"compilation_config": "{}"}},
    ],
)
def test_an_argument_of_the_users_own_is_left_as_it_is(settings: dict) -> None:
    assert compilation_options(VllmConfig(**settings), cuda=True) == {}
