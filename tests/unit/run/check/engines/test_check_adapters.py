"""Rules about weight_sync.lora=adapter."""

import json
from pathlib import Path

import pytest

from rlframe.run.check import check
from rlframe.run.check.engines.adapters import engine_adapter
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError
from tests.e2e.recipes import make_model

ADAPTER = ["rollout=vllm", "cluster.device=cpu", "weight_sync.lora=adapter", "train.lora.rank=4"]
DENSE = ["model.path={folder}", "model.random_init=true", "train.parallel=d1"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings of a dense model, which has no weights on disk."""
    folder = make_model("Qwen/Qwen3-4B", tmp_path_factory.mktemp("model") / "dense", shrunk=True)
    # vLLM on a CPU has no attention for heads of 16 numbers.
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 32}))
    return [setting.format(folder=folder) for setting in DENSE]


def test_a_dense_model_may_send_adapters_to_vllm(dense: list[str]) -> None:
    run = load("grpo_qwen3_moe", [*dense, *ADAPTER])
    check(run)
    adapter = engine_adapter(run)
    assert adapter is not None and adapter.rank == 4
    # A and B of seven matrices in each of two layers.
    assert len(adapter.tensors) == 28
    assert adapter.tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"] == (4, 48)


def test_merged_weights_need_no_adapter_in_engines(dense: list[str]) -> None:
    assert engine_adapter(load("grpo_qwen3_moe", [*dense, *ADAPTER, "weight_sync.lora=merged"])) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["~train.lora"], "weight_sync.lora has no effect without train.lora"),
        (["rollout=transformers"], "weight_sync.lora must be merged with rollout.name=transformers, got adapter"),
        (["rollout=sglang"], "weight_sync.lora must be merged with rollout.name=sglang, got adapter"),
        (["train.lora.modules_to_save=[norm]"], "train.lora.modules_to_save must be [] with weight_sync.lora=adapter"),
        (["weight_sync.transport=reload"], "weight_sync.transport must not be reload with weight_sync.lora=adapter"),
        (["rollout.speculative.method=ngram"], "weight_sync.lora must be merged with rollout.speculative, got adapter"),
        (["checkpoint.start_from=there"], "checkpoint.start_from must be null with weight_sync.lora=adapter"),
        (["mode=self_test"], "weight_sync.lora must be merged with mode=self_test"),
        (["cluster.device=cuda"], "rollout.sleep_level must be 0 or 1 with weight_sync.lora=adapter, got 2"),
        (["rollout.engine_options.enable_lora=true"], "engine_options must not hold enable_lora"),
        (
            ["weight_sync.hold=host", "loop.max_policy_lag=1", "cluster.colocate=false"],
            "weight_sync.hold must be none with weight_sync.lora=adapter, got host",
        ),
    ],
)
def test_what_needs_whole_weights_is_refused_with_the_reason(
    dense: list[str], overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", [*dense, *ADAPTER, *overrides]))
    assert words in str(refused.value)


def test_a_model_with_experts_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", ADAPTER))
    assert "weight_sync.lora must be merged for qwen3_moe, which has experts" in str(refused.value)


@pytest.mark.thorough
def test_an_adapter_of_the_output_layer_needs_all_logits_at_once_and_rounds_them(tmp_path: Path) -> None:
    folder = make_model("Qwen/Qwen3-8B", tmp_path / "untied", shrunk=True)
    dense = [setting.format(folder=folder) for setting in DENSE]
    lora = ["train.lora.rank=4", "train.lora.target_modules=[lm_head]", "train.logits_chunk_tokens=16"]
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", [*dense, *lora, "model.float32_logits=true", "train.dtype=bfloat16"]))
    assert "train.logits_chunk_tokens must be null with an adapter of lm_head.weight" in str(refused.value)
    assert "model.float32_logits must be false with an adapter of lm_head.weight" in str(refused.value)
