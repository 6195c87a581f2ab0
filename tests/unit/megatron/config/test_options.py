"""Options of training: what is refused, and what the accepted ones become in Megatron and in the environment."""

from typing import Any

import pytest

from rlframe.megatron.config.options import KernelConfig
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.worker.environment import variables
from rlframe.utils.build import build
from rlframe.utils.errors import ConfigError


def faults(**values: Any) -> list[str]:
    """What building a TrainConfig from `values` says."""
    try:
        build(TrainConfig, values)
    except ConfigError as error:
        return list(map(str, error.faults))
    return []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"recompute_options": {"method": "block"}},
            "recompute_options.method and layers have no effect with recompute",
        ),
        ({"recompute_options": {"modules": ["mlp"]}}, "recompute_options.modules has no effect with recompute=none"),
        ({"recompute": "selective"}, "recompute=selective needs recompute_options.modules"),
        (
            {"recompute": "full", "recompute_options": {"layers": 0}},
            "recompute_options.layers must be at least 1, got 0",
        ),
        (
            {"recompute": "selective", "recompute_options": {"modules": ["mpl"]}},
            "recompute_options.modules must be among core_attn, layernorm, mla_up_proj, mlp, moe, moe_act, "
            "shared_experts, got mpl",
        ),
        ({"fp8": {"format": "e4m3"}}, "fp8.format must stay hybrid with recipe=off"),
        ({"fp8": {"recipe": "delayed"}, "dtype": "float32"}, "fp8.recipe needs dtype=bfloat16, got dtype=float32"),
        ({"fp8": {"recipe": "mxfp8"}}, "fp8.recipe must be one of off, delayed, tensorwise, blockwise, got 'mxfp8'"),
        (
            {"optimizer": {"precision_aware": True}, "dtype": "float32"},
            "optimizer.precision_aware needs dtype=bfloat16",
        ),
        ({"optimizer": {"moment_dtype": "bfloat16"}}, "optimizer.moment_dtype=bfloat16 needs precision_aware=true"),
        ({"optimizer": {"cpu_offload_fraction": 1.5}}, "optimizer.cpu_offload_fraction must be at most 1, got 1.5"),
        (
            {"optimizer": {"cpu_offload_fraction": 0.5, "precision_aware": True}},
            "optimizer.precision_aware must be false with cpu_offload_fraction above 0",
        ),
        (
            {"communication": {"reduce_in_float32": False}, "dtype": "float32"},
            "communication.reduce_in_float32=false needs dtype=bfloat16",
        ),
        (
            {"communication": {"overlap_param_gather": True}},
            "communication.overlap_param_gather needs overlap_grad_reduce=true",
        ),
        (
            {"parallel": "d2", "communication": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
            "communication.overlap_param_gather has no effect with num_minibatches * epochs_per_batch = 1",
        ),
        (
            {
                "parallel": "d2",
                "num_minibatches": 2,
                "lora": {"rank": 4},
                "communication": {"overlap_grad_reduce": True, "overlap_param_gather": True},
            },
            "communication.overlap_param_gather must be false with lora, got true",
        ),
        (
            {"parallel": "d1t2|ffn:d1t2", "communication": {"overlap_grad_reduce": True}},
            "communication.overlap_grad_reduce has no effect with parallel=d1t2|ffn:d1t2",
        ),
        ({"communication": {"bucket_parameters": 5}}, "communication.bucket_parameters has no effect without overlap"),
        ({"moe": {"aux_loss_coefficient": -0.1}}, "moe.aux_loss_coefficient must be at least 0, got -0.1"),
        ({"moe": {"capacity_factor": 0.0}}, "moe.capacity_factor must be above 0 (null drops no token), got 0.0"),
        ({"moe": {"allow_token_drop": True}}, "moe.allow_token_drop has no effect without capacity_factor"),
        (
            {"moe": {"send_once": False, "dispatcher": "allgather"}},
            "moe.send_once has no effect with dispatcher=allgather",
        ),
        (
            {"moe": {"freeze_router": True, "z_loss_coefficient": 0.1}},
            "moe.freeze_router must be false with aux_loss_coefficient or z_loss_coefficient",
        ),
        ({"optimizer": {"muon": {"momentum": 0.9}}}, "optimizer.muon has no effect with name=adamw"),
        (
            {"optimizer": {"name": "muon", "precision_aware": True}},
            "optimizer.precision_aware must be false with name=muon",
        ),
        (
            {"optimizer": {"name": "muon", "cpu_offload_fraction": 0.5}},
            "optimizer.cpu_offload_fraction must be 0 with name=muon",
        ),
        ({"optimizer": {"name": "muon"}, "lora": {"rank": 4}}, "optimizer.name must be adamw with lora, got muon"),
        ({"optimizer": {"skip_outlier_factor": 0.5}}, "optimizer.skip_outlier_factor must be above 1, got 0.5"),
    ],
)
def test_what_cannot_be_or_would_do_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    (fault,) = faults(**values)
    assert fault.startswith(message), fault


def test_layouts_whose_experts_alone_are_replicated_may_overlap() -> None:
    # Tensor-parallel ranks with whole experts each: the experts' gradients are summed over the two.
    assert faults(parallel="d1t2|ffn:d2t1", communication={"overlap_grad_reduce": True}) == []


def test_the_environment_holds_what_the_options_ask_for() -> None:
    # Said either way: whoever starts the run may have it in the environment.
    assert variables(TrainConfig()) == {"TORCHINDUCTOR_COMPILE_THREADS": "1", "NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}
    assert variables(TrainConfig(kernels=KernelConfig(cutlass_experts=False)))["NVTE_USE_CUTLASS_GROUPED_GEMM"] == "0"
    assert variables(TrainConfig(parallel="d1t2"))["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    deterministic = variables(TrainConfig(deterministic=True))
    assert deterministic["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert deterministic["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and deterministic["NCCL_ALGO"] == "^NVLS,NVLSTree"
