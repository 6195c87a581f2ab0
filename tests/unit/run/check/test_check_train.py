"""Rules between the options of training and the model, the devices and the algorithm."""

import re
from dataclasses import replace
from typing import Any

import pytest

from rlframe.megatron.config.train import TrainConfig
from rlframe.models.families.base import Architecture
from rlframe.run.check import train as check_train
from rlframe.run.check.roles import critic
from rlframe.run.load import load
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 6,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "ffn_hidden_size": 384,
    "vocab_size": 100,
    "max_positions": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
DENSE = Architecture(model_type="qwen3", moe_layers=(False,) * 6, **SIZES)
EXPERTS = Architecture(
    model_type="qwen3_moe",
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=48,
    moe_layers=(True,) * 6,
    **SIZES,
)


def faults(architecture: Architecture, *, cuda: bool = True, online: bool = True, **train: Any) -> list[str]:
    """All faults of a TrainConfig with this model."""
    config = build(TrainConfig, train)
    found = [
        *check_train.device_faults(config, cuda=cuda),
        *check_train.model_faults(config, architecture),
        *check_train.expert_faults(config, online=online),
        *check_train.adapter_faults(config),
        *check_train.sleep_faults(config, online=online, shared=True),
    ]
    return list(map(str, found))


@pytest.mark.parametrize(
    ("train", "start"),
    [
        ({"fp8": {"recipe": "delayed"}}, "train.fp8.recipe needs CUDA and Transformer Engine, got delayed on a CPU"),
        (
            {"recompute": "full", "offload_activations": True},
            "train.offload_activations needs CUDA and Transformer Engine, got true on a CPU",
        ),
        ({"optimizer": {"precision_aware": True}}, "train.optimizer.precision_aware needs CUDA and Transformer Engine"),
        ({"optimizer": {"cpu_offload_fraction": 0.5}}, "train.optimizer.cpu_offload_fraction needs CUDA"),
        ({"kernels": {"rope_fusion": False}}, "train.kernels.rope_fusion has no effect on a CPU, got false"),
        ({"kernels": {"attention": "fused"}}, "train.kernels.attention has no effect on a CPU, got fused"),
        (
            {"recompute": "selective", "recompute_options": {"modules": ["moe_act"]}},
            "train.recompute_options.modules: moe_act needs grouped experts, which need CUDA",
        ),
        (
            {"recompute": "selective", "recompute_options": {"modules": ["layernorm"]}},
            "train.recompute_options.modules: layernorm needs Transformer Engine, which needs CUDA",
        ),
    ],
)
def test_what_needs_cuda_is_refused_on_a_cpu_by_name(train: dict[str, Any], start: str) -> None:
    (fault,) = faults(EXPERTS, cuda=False, **train)
    assert fault.startswith(start), fault
    assert faults(EXPERTS, cuda=True, **train) == []


@pytest.mark.parametrize(
    ("train", "start"),
    [
        ({"moe": {"z_loss_coefficient": 0.1}}, "train.moe.z_loss_coefficient has no effect on qwen3, which is dense"),
        (
            {"kernels": {"cutlass_experts": False}},
            "train.kernels.cutlass_experts has no effect on qwen3, which is dense",
        ),
        (
            {"kernels": {"expert_products": False}},
            "train.kernels.expert_products has no effect on qwen3, which is dense",
        ),
        ({"kernels": {"permute_fusion": False}}, "train.kernels.permute_fusion has no effect on qwen3, which is dense"),
        ({"moe": {"freeze_router": True}}, "train.moe.freeze_router has no effect on qwen3, which is dense, got true"),
        (
            {"recompute": "selective", "recompute_options": {"modules": ["mlp", "moe"]}},
            "train.recompute_options.modules: moe has no effect on qwen3, which is dense",
        ),
    ],
)
def test_options_of_experts_are_faults_of_a_dense_model(train: dict[str, Any], start: str) -> None:
    (fault,) = faults(DENSE, **train)
    assert fault.startswith(start), fault
    assert faults(EXPERTS, **train) == []


@pytest.mark.parametrize(
    ("train", "start"),
    [
        ({"recompute": "full", "recompute_options": {"layers": 4}}, "train.recompute_options.layers must divide the 6"),
        (
            {"recompute": "full", "recompute_options": {"layers": 7, "method": "block"}},
            "train.recompute_options.layers must be at most the 6 layers",
        ),
        (
            {"recompute": "full", "recompute_options": {"layers": 4, "method": "block"}, "parallel": "d1p2"},
            "train.recompute_options.layers must be at most the 3 layers",
        ),
        # Megatron groups the layers of each chunk.
        (
            {"recompute": "full", "recompute_options": {"layers": 2}, "parallel": {"pp": 3, "vpp": 2}},
            "train.recompute_options.layers must be at most the 1 layers",
        ),
        (
            {"recompute": "full", "recompute_options": {"layers": 3}, "parallel": {"pp": 2, "first_stage_layers": 2}},
            "train.recompute_options.layers must divide the 2 layers",
        ),
        # 384 / tp 4 = 96 is 6 * 16, and no multiple of 128.
        (
            {"fp8": {"recipe": "blockwise"}, "parallel": "d1t4"},
            "train.fp8.recipe=blockwise needs ffn_hidden_size / tp to be a multiple of 128, got 96 of qwen3",
        ),
    ],
)
def test_options_must_fit_the_models_sizes(train: dict[str, Any], start: str) -> None:
    (fault,) = faults(DENSE, **train)
    assert fault.startswith(start), fault


@pytest.mark.parametrize(
    ("options", "parallel"),
    [
        ({"layers": 2}, {"pp": 2, "first_stage_layers": 2}),
        ({"layers": 4, "method": "block"}, {"pp": 2, "first_stage_layers": 2}),
        ({"layers": 2}, {"pp": 4, "pipeline_layout": "Ett|tt|tt|L"}),
    ],
)
def test_groups_of_recomputed_layers_need_not_divide_the_mean_of_uneven_stages(
    options: dict[str, Any], parallel: dict[str, Any]
) -> None:
    assert faults(DENSE, recompute="full", recompute_options=options, parallel=parallel) == []


@pytest.mark.parametrize(
    ("moe", "layout", "start"),
    [
        ({"capacity_factor": 1.0}, "d1", "train.moe.capacity_factor must be null with an online algorithm, got 1.0"),
        (
            {"dispatcher": "allgather"},
            "d1t2p2",
            "train.moe.dispatcher=allgather is not supported with pipeline stages (p2 in train.parallel)",
        ),
        ({"dispatcher": "allgather"}, "d2e2", "train.moe.dispatcher=allgather needs ranks with equally many tokens"),
        ({"dispatcher": "flex"}, "d1", "train.moe.dispatcher=flex needs the package deep_ep"),
    ],
)
def test_what_experts_cannot_do_is_refused(moe: dict[str, Any], layout: str, start: str) -> None:
    (fault,) = faults(EXPERTS, moe=moe, parallel=layout)
    assert fault.startswith(start), fault


def test_a_routing_bias_moves_only_where_there_is_one() -> None:
    (fault,) = faults(EXPERTS, moe={"bias_update_rate": 0.001})
    assert fault.startswith("train.moe.bias_update_rate has no effect on qwen3_moe, whose router has no bias"), fault
    assert faults(replace(EXPERTS, sigmoid_router=True), moe={"bias_update_rate": 0.001}) == []


def test_adapters_leave_no_router_to_freeze() -> None:
    (fault,) = faults(EXPERTS, moe={"freeze_router": True}, lora={})
    assert fault.startswith("train.moe.freeze_router has no effect with train.lora"), fault


def test_adapters_leave_no_routing_bias_to_move() -> None:
    (fault,) = faults(replace(EXPERTS, sigmoid_router=True), moe={"bias_update_rate": 0.001}, lora={})
    assert fault.startswith("train.moe.bias_update_rate must be 0 with train.lora, got 0.001"), fault


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_adapters_beside_fp8_are_refused(recipe: str) -> None:
    (fault,) = faults(DENSE, fp8={"recipe": recipe}, lora={})
    assert fault.startswith(f"train.fp8.recipe={recipe} is not supported with train.lora"), fault
    assert faults(DENSE, fp8={"recipe": recipe}) == faults(DENSE, lora={}) == []


def test_dropped_tokens_may_be_asked_for() -> None:
    assert faults(EXPERTS, online=False, moe={"capacity_factor": 1.0}) == []
    assert faults(EXPERTS, moe={"capacity_factor": 1.0, "allow_token_drop": True}) == []
    (fault,) = faults(EXPERTS, online=False, moe={"capacity_factor": 1.0, "allow_token_drop": True})
    assert fault.startswith("train.moe.allow_token_drop has no effect with an algorithm that samples nothing"), fault


@pytest.mark.parametrize("setting", ["offload_optimizer", "release_memory"])
def test_a_policy_sleeps_only_where_somebody_takes_its_place(setting: str) -> None:
    config = TrainConfig(**{setting: True})
    assert list(check_train.sleep_faults(config, online=True, shared=True)) == []
    for online, colocate in ((True, False), (False, True)):
        (fault,) = map(str, check_train.sleep_faults(config, online=online, shared=colocate))
        assert fault.startswith(f"train.{setting} has no effect with")


@pytest.mark.parametrize(
    ("layers", "train", "start"),
    [
        (0, {"mtp": {"mode": "keep"}}, "train.mtp.mode must be drop, got keep: config.json of qwen3 promises no layer"),
        (2, {"mtp": {"mode": "train"}}, "train.mtp.mode must be drop, got train: config.json promises 2 layers"),
        (1, {"mtp": {"mode": "train"}, "parallel": "d1p2"}, "train.mtp.mode must be drop or keep with pp 2, got train"),
        (1, {"mtp": {"mode": "train"}, "share_prompts": True}, "train.mtp.mode must be drop or keep with train.share_"),
        (1, {"mtp": {"mode": "train"}, "logits_chunk_tokens": 8}, "train.mtp.mode must be drop or keep with train.log"),
    ],
)
def test_a_head_for_multi_token_prediction_that_cannot_be_kept_is_refused(
    layers: int, train: dict[str, Any], start: str
) -> None:
    (fault,) = faults(replace(DENSE, mtp_layers=layers), **train)
    assert fault.startswith(start), fault
    assert not faults(replace(DENSE, mtp_layers=1), mtp={"mode": "keep"}, parallel="d1p2")


@pytest.mark.parametrize(
    ("train", "start"),
    [
        ({"mtp": {"loss_scaling_factor": 0.2}}, "mtp.loss_scaling_factor has no effect with mode=drop, got 0.2"),
        ({"mtp": {"mode": "keep", "detach": False}}, "mtp.detach has no effect with mode=keep"),
        ({"mtp": {"mode": "train"}, "lora": {"rank": 4}}, "mtp.mode must be drop or keep with lora, got train"),
    ],
)
def test_settings_of_the_head_that_contradict_others_are_refused(train: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(start)):
        build(TrainConfig, train)


def test_a_critic_has_no_head_for_multi_token_prediction() -> None:
    def found(*overrides: str, layers: int = 1) -> list[str]:
        run = load("grpo_qwen3_moe", ["algorithm=ppo", *overrides])
        return [str(fault) for fault in critic.mtp_faults(run, replace(DENSE, mtp_layers=layers))]

    (fault,) = found("critic.train.mtp.mode=train")
    assert fault.startswith("critic.train.mtp.mode has no effect on a critic, got train: it does not predict tokens")
    # Entries of the policy that the critic's settings take over, and models of which another rule speaks.
    assert not found("train.mtp.mode=train") and not found("train.mtp.mode=train", "critic.train.dtype=float32")
    assert not found("critic.train.mtp.mode=train", layers=0)
