"""What a rank's process needs before CUDA and Transformer Engine start in it."""

import os

import torch

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig


def variables(train: TrainConfig) -> dict[str, str]:
    """Environment variables that the options of training ask for."""
    # Of the handful of small functions that Megatron compiles; a pool of compilers per rank would cost more than they.
    values = {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "NVTE_USE_CUTLASS_GROUPED_GEMM": str(int(train.kernels.cutlass_experts)),
    }
    parallel = Parallel.parse(train.parallel)
    if parallel.tp > 1 or parallel.cp > 1:
        # Kernels then start in the order they were launched: communication before the product that hides it.
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if train.deterministic:
        values |= {
            # Megatron refuses deterministic_mode without it; Transformer Engine then leaves out attention kernels whose
            # sums depend on timing.
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            # cuBLAS otherwise shares a workspace between streams.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Sums in a switch have no fixed order.
            "NCCL_ALGO": "^NVLS,NVLSTree",
        }
    return values


def prepare(train: TrainConfig) -> None:
    """Call once per process, before anything touches CUDA."""
    os.environ.update(variables(train))
    if train.deterministic:
        # An operation without a deterministic form raises, by name.
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written; filling all of it with NaN would cost a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False
