"""Settings that a rank's process needs before CUDA and Transformer Engine start in it."""

import os

import torch

from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig


def variables(train: TrainConfig) -> dict[str, str]:
    """Returns the environment variables that the options of training need."""
    # Of the few small functions that Megatron compiles; a pool of compilers per rank would cost more than they do.
    values = {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "NVTE_USE_CUTLASS_GROUPED_GEMM": str(int(train.kernels.cutlass_experts)),
    }
    parallel = Parallel.parse(train.parallel)
    if parallel.tp > 1 or parallel.cp > 1:
        # Kernels then start in launch order: communication before the product that hides it.
        values["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if train.deterministic:
        values |= {
            # Megatron refuses deterministic_mode without it; Transformer Engine then avoids attention kernels whose
            # sums depend on timing.
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            # cuBLAS otherwise shares a workspace between streams.
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            # Sums in a network switch have no fixed order.
            "NCCL_ALGO": "^NVLS,NVLSTree",
        }
    return values


def prepare(train: TrainConfig) -> None:
    """Prepares the process. Must be called once, before anything uses CUDA."""
    os.environ.update(variables(train))
    if train.deterministic:
        # An operation without a deterministic form then raises, by name.
        torch.use_deterministic_algorithms(True)
        # Nothing here reads uninitialised memory; filling all of it with NaN would cost a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False
