"""Rules about engines in FP8."""

from pathlib import Path

import pytest

from rlframe.run.check import check
from rlframe.run.check.context import algorithm_of
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError
from tests.rollout_models import make_with_tokenizer

pytestmark = pytest.mark.thorough
FP8 = ["rollout=vllm", "rollout.quantization=fp8_block", "train.dtype=bfloat16", "cluster=cuda", "train=cuda"]
CACHE = ["rollout=vllm", "rollout.kv_cache_dtype=fp8", "train.dtype=bfloat16"]
KEY = "rollout.quantization"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of whole blocks: hidden size 256, 4 heads of 64, 2 of them for keys, experts of width 256."""
    folder = tmp_path_factory.mktemp("model")
    wide = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
    make_with_tokenizer("qwen3_moe", folder, **wide)
    return f"model.path={folder}"


def refusal(overrides: list[str]) -> str:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", overrides))
    return str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.dtype=float32"], f"rollout.dtype must be bfloat16 with {KEY}=fp8_block, got float32"),
        (["weight_sync.transport=reload"], f"weight_sync.transport must not be reload with {KEY}=fp8_block"),
        (["rollout.moe_backend=auto"], f"rollout.moe_backend must be triton with {KEY}=fp8_block, got auto"),
        (
            ["rollout.tp=2"],
            f"{KEY}=fp8_block needs num_kv_heads * head_dim / 2 to be a multiple of 128, got 64 of qwen3_moe",
        ),
        (
            ["train.parallel=d1t2"],
            f"must leave each rank whole blocks of 128 with {KEY}=fp8_block: num_kv_heads * head_dim / 2 is 64",
        ),
        (["cluster.device=cpu"], f"{KEY} must be none for qwen3_moe on a CPU, which has experts, got fp8_block"),
        (
            ["rollout=sglang", "cluster.device=cpu"],
            f"{KEY} must be none for qwen3_moe on a CPU with rollout.name=sglang, got fp8_block: SGLang repacks",
        ),
        (
            ["rollout=sglang", "rollout.kv_cache_dtype=fp8", "cluster.device=cpu"],
            "rollout.kv_cache_dtype must be auto for qwen3_moe on a CPU with rollout.name=sglang, got fp8: SGLang has",
        ),
        (["rollout.engine_options.quantization=fp8"], "engine_options must not hold quantization"),
    ],
)
def test_what_cannot_be_quantised_alike_on_both_sides_is_refused(overrides: list[str], words: str, model: str) -> None:
    assert words in refusal([*FP8, model, *overrides])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_on_gpus_may_hold_matrices_in_8_bits(engine: str, model: str) -> None:
    # On this machine other rules are broken.
    assert KEY not in refusal([*FP8, model, f"rollout={engine}"])


def test_sizes_and_models_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    # Of the embedded model.
    assert "needs expert_ffn_hidden_size to be a multiple of 128, got 64 of qwen3_moe" in refusal(FP8)
    make_with_tokenizer("deepseek_v3", tmp_path)
    words = refusal([*FP8, f"model.path={tmp_path}"])
    assert f"{KEY} must be none for deepseek_v3" in words and "does not know whether engines quantise" in words
    words = refusal([*CACHE, f"model.path={tmp_path}"])
    assert "rollout.kv_cache_dtype must be auto for deepseek_v3, got fp8" in words
    for name in ("deepseek_v3", "gpt_oss", "qwen3_next"):
        make_with_tokenizer(name, tmp_path / name)
        words = refusal([*CACHE, "rollout=sglang", "cluster.device=cuda", f"model.path={tmp_path / name}"])
        assert f"rollout.kv_cache_dtype must be auto for {name} with rollout.name=sglang, got fp8" in words


def test_a_cache_in_8_bits_needs_activations_in_16() -> None:
    check(load("grpo_qwen3_moe", CACHE))
    words = refusal([*CACHE, "train.dtype=float32"])
    assert "rollout.dtype must be bfloat16 with rollout.kv_cache_dtype=fp8, got float32" in words


def test_a_run_that_corrects_for_nothing_is_warned(model: str) -> None:
    def cautions(*overrides: str) -> str:
        run = load("grpo_qwen3_moe", [*FP8, model, *overrides])
        return "".join(algorithm_of(run).cautions(run.facts))

    assert "with rollout.quantization=fp8_block engines sample by probabilities further from" in cautions()
    assert not cautions("algorithm.correction.weight=token", "algorithm.correction.weight_cap=2")
    assert not cautions("algorithm.correction.bypass=true")
