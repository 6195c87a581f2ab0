"""Rules about rollout.speculative."""

import json
from pathlib import Path

import pytest

from rlframe.megatron.config.mtp import MtpConfig, MtpMode
from rlframe.models.hub import EMBEDDED
from rlframe.run.check import check
from rlframe.run.check.engines import speculative
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

NGRAM = ["rollout.speculative.method=ngram"]
DRAFT = ["rollout.speculative.method=draft_model"]
MTP = ["rollout.speculative.method=mtp"]
CUDA = ["cluster.device=cuda", "train.offload_optimizer=false"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout=transformers", *NGRAM], "rollout.speculative must be null with rollout.name=transformers"),
        (["rollout=sglang", *NGRAM], "SGLang on a CPU takes the likeliest token after a draft"),
        (
            ["rollout=vllm", *NGRAM, "train.moe.router_replay=true"],
            "rollout.speculative must be null with train.moe.router_replay=true, got method=ngram",
        ),
        (["rollout=vllm", *NGRAM, "rollout.speculative.num_tokens=0"], "rollout.speculative.num_tokens must be"),
        (["rollout=vllm", *NGRAM, "rollout.speculative.model=a"], "rollout.speculative.model has no effect"),
        (["rollout=vllm", *NGRAM, "rollout.speculative.min_match_tokens=9"], "must not exceed max_match_tokens=4"),
        (["rollout=vllm", *DRAFT], "rollout.speculative.model must name the draft model with method=draft_model"),
        (["rollout=vllm", *DRAFT, "rollout.speculative.model=qwen3_moe_tiny"], "embedded models have none"),
        (["rollout=vllm", *DRAFT, "rollout.speculative.model=./nowhere/at/all"], "rollout.speculative.model './nowh"),
        (["rollout=vllm", *MTP], "qwen3_moe_tiny has no heads for multi-token prediction"),
        (
            ["rollout=vllm", "rollout.engine_options={speculative_config:{method:ngram}}"],
            "must not hold speculative_config",
        ),
        (
            ["rollout=vllm", *CUDA, *DRAFT, "rollout.speculative.model=d"],
            "rollout.sleep_level must be 0 or 1 with rollout.speculative.method=draft_model, got 2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", overrides))
    assert words in str(refused.value)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    source = EMBEDDED / "qwen3_moe_tiny"
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    with pytest.raises(ConfigError) as refused:
        check(load("grpo_qwen3_moe", ["rollout=vllm", *DRAFT, f"rollout.speculative.model={tmp_path}"]))
    assert f"rollout.speculative.model must have vocab_size={config['vocab_size']}" in str(refused.value)


def test_heads_that_a_sync_brings_need_no_checkpoint_and_survive_the_deepest_sleep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_nextn_predict_layers": 1}))
    run = load("grpo_qwen3_moe", ["rollout=vllm", *CUDA, *MTP])
    run.model.path, run.model.random_init = str(tmp_path), True
    found = [str(fault) for fault in speculative.faults(run, cuda=True)]
    assert len(found) == 2
    assert found[0].startswith(
        "rollout.sleep_level must be 0 or 1 with rollout.speculative.method=mtp and train.mtp.mo"
    )
    assert "or train.mtp.mode=keep, with which every sync brings them" in found[0]
    assert "must not be mtp with model.random_init=true and train.mtp.mode=drop" in found[1]
    run.train.mtp = MtpConfig(mode=MtpMode.KEEP)
    assert list(speculative.faults(run, cuda=True)) == []
