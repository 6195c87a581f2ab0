"""Process groups: starting torch.distributed and Megatron's parallel state on one rank."""

from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rlframe.cluster.watch.marks import mark
from rlframe.megatron import compat
from rlframe.megatron.config.parallel import Coordinates, Parallel
from rlframe.megatron.cpu import platform


def initialize(
    parallel: Parallel, *, rank: int, device: torch.device, init_method: str, seed: int, timeout_s: float
) -> Coordinates:
    """Joins the world of this worker group and builds Megatron's process groups.

    Args:
        init_method: `tcp://host:port` of rank 0.
        timeout_s: a collective that waits longer than this fails.
    """
    compat.name_after_torch()
    kinds = "gloo" if device.type == "cpu" else f"cpu:gloo,cuda:{platform.backend(device)}"
    mark(f"meeting the other ranks of {parallel.world} at {init_method}")
    dist.init_process_group(
        kinds, init_method=init_method, rank=rank, world_size=parallel.world, timeout=timedelta(seconds=timeout_s)
    )
    mark("making process groups")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Coordinates(
        rank=rank,
        dp_rank=parallel_state.get_data_parallel_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        reports=parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def shutdown() -> None:
    """Leaves all groups, so that a process can join another world (tests do)."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
