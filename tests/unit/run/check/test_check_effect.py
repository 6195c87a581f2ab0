"""Settings that have an effect only beside others are refused without them."""

import pytest

from rlframe.run.check import check
from rlframe.run.check.effect import NEEDS, changed
from rlframe.run.load import load
from rlframe.utils.errors import ConfigError

AHEAD = ["cluster.colocate=false", "loop.max_policy_lag=2"]


@pytest.mark.parametrize(
    ("config", "overrides", "fault"),
    [
        (
            "grpo_qwen3_moe",
            ["checkpoint.best_mode=min"],
            "checkpoint.best_mode has no effect with keep_best=0, got min; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["alerts.truncated.limit=0.8"],
            "alerts.truncated.limit has no effect with algorithm.name=sft, got 0.8; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["alerts.stop=[not_finite,reward_flat]"],
            "alerts.stop must not name reward_flat, got ['not_finite', 'reward_flat']: algorithm.name=sft samples "
            "nothing, so that it never comes; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["+alerts.own.mine.name=truncated"],
            "alerts.own.mine.name must be path/to/file.py:Name or package.module:Name, got 'truncated'",
        ),
        (
            "grpo_qwen3_moe",
            ["checkpoint.export=false", "checkpoint.export_dtype=float32"],
            "checkpoint.export_dtype has no effect with export=false and export_every_steps=0, got float32; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["model.revision=main"],
            "model.revision has no effect with model.path=qwen3_moe_tiny, which is not a hub id, got main; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["weight_sync.probe_every_steps=0", "weight_sync.probe_limit_nats=1"],
            "weight_sync.probe_limit_nats has no effect with probe_every_steps=0, got 1.0; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["train.context_parallel.communication=a2a"],
            "train.context_parallel.communication has no effect with train.parallel=d2e2, where no two ranks share a "
            "sequence, got a2a; remove it",
        ),
        (
            "reward_model_qwen3_moe_tiny",
            ["train.logits_chunk_tokens=512"],
            "train.logits_chunk_tokens has no effect with algorithm.name=reward_model, whose loss reads more than "
            "logprobs and entropies, got 512; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["train.optimizer.decay_fraction=0.5"],
            "train.optimizer.decay_fraction has no effect with schedule=linear, only with wsd, got 0.5; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["cluster.colocate=false", "rollout.cache_after_sync=keep"],
            "rollout.cache_after_sync has no effect with loop.max_policy_lag=0: no request runs during a sync, got "
            "keep; remove it",
        ),
        (
            "grpo_qwen3_moe",
            [*AHEAD, "loop.in_flight_updates=false", "rollout.cache_after_sync=keep"],
            "rollout.cache_after_sync has no effect with loop.in_flight_updates=false: no request runs during a sync, "
            "got keep; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["loop.pipeline_depth=2"],
            "loop.pipeline_depth has no effect with max_policy_lag=0, got 2; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["loop.in_flight_updates=false"],
            "loop.in_flight_updates has no effect with max_policy_lag=0, got false; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["evaluation.share=0.5"],
            "evaluation.share has no effect with engines that do not sample while the policy trains "
            "(loop.max_policy_lag above 0, cluster.colocate=false), where training waits for evaluations, got 0.5; "
            "remove it",
        ),
        (
            "grpo_qwen3_moe",
            [*AHEAD, "evaluation.share=0.5", "data.evaluation_count=0", "evaluation.every_steps=0"],
            "evaluation.share has no effect with data.evaluation_count=0, which holds nothing out, got 0.5; remove it",
        ),
        (
            "grpo_qwen3_moe",
            [*AHEAD, "evaluation.num_engines=1", "data.evaluation_count=0", "evaluation.every_steps=0"],
            "evaluation.num_engines has no effect with data.evaluation_count=0, which holds nothing out, got 1; remove "
            "it",
        ),
        (
            "grpo_qwen3_moe",
            [*AHEAD, "evaluation.num_engines=1", "evaluation.share=0.5"],
            "evaluation.share has no effect with evaluation.num_engines=1, which share no engine, got 0.5; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["evaluation.num_engines=1"],
            "evaluation.num_engines has no effect with algorithm.name=sft, got 1; remove it",
        ),
        (
            "grpo_qwen3_moe",
            ["weight_sync.hold=host"],
            "weight_sync.hold has no effect with engines that do not sample while the policy trains "
            "(loop.max_policy_lag above 0, cluster.colocate=false), got host; remove it",
        ),
        (
            "grpo_qwen3_moe",
            [*AHEAD, "weight_sync.hold=host", "rollout.max_restarts=0"],
            "weight_sync.hold has no effect with rollout.max_restarts=0: no engine comes back, got host; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["loop.max_policy_lag=1"],
            "loop.max_policy_lag has no effect with algorithm.name=sft, got 1; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["rollout.temperature=0.5"],
            "rollout.temperature has no effect with algorithm.name=sft, got 0.5; remove it",
        ),
        (
            "sft_qwen3_moe_tiny",
            ["logging.samples_per_step=9"],
            "logging.samples_per_step has no effect with algorithm.name=sft, got 9; remove it",
        ),
        (
            "embedding_qwen3_moe_tiny",
            ["train.lora.rank=4", "train.lora.dropout=0.1"],
            "train.lora.dropout must be 0 with algorithm.name=embedding, got 0.1: the loss is that of states without "
            "dropout, so that the gradient of states with it would not be its; remove it",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(config: str, overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(config, overrides))
    assert list(map(str, caught.value.faults)) == [fault]


def test_the_critics_schedule_is_looked_at_like_the_policys() -> None:
    overrides = ["algorithm=ppo", "critic.train.optimizer.decay_fraction=0.5"]
    with pytest.raises(ConfigError, match="critic.train.optimizer.decay_fraction has no effect with schedule=linear"):
        check(load("grpo_qwen3_moe", overrides))


def test_only_what_differs_from_its_default_is_changed() -> None:
    run = load("grpo_qwen3_moe", ["train.optimizer.beta1=0.5"])
    keys = {key for key, _ in changed(run)}
    assert "train.optimizer.beta1" in keys and "train.optimizer.eps" not in keys


def test_every_row_speaks_of_settings_that_there_are() -> None:
    engines = {"gpu_memory_utilization", "sleep_level", "moe_backend", "enforce_eager", "compile"}
    known = {f"rollout.{name}" for name in engines}
    run = load("grpo_qwen3_moe")
    for key in {key for need in NEEDS for key in need.keys} - known:
        owner = run
        for name in key.split("."):
            owner = getattr(owner, name)
