"""How vLLM is started: its environment and its engine arguments."""

import importlib.util
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rlframe.rollout.vllm.config import VllmConfig
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault

EXTENSION = "rlframe.rollout.vllm.worker.RankExtension"
CPU_CACHE_BYTES = 1 << 30
"""Memory of the key-value cache on CPU, where a share of all memory would starve the rest of the machine."""


def set_environment(config: VllmConfig, *, cuda: bool) -> None:
    """What vLLM and its processes read from the environment; mostly once, when they import it."""
    assert importlib.util.find_spec("vllm") is not None, "rollout.name=vllm is checked with the configuration"
    # Ray's and our own threads do not survive a fork.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Every request has a seed, and vLLM uses FlashInfer's sampler for none of those; it would only be compiled for the
    # warm-up, or be found missing.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    # Ray decides how many cores a worker has; vLLM's own binding would put several engines onto the same ones.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # No reports to vLLM's authors from a training run.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not cuda and config.tp == 1:
        # Without this vLLM gives a CPU worker a process of its own, only to bind its threads, which we do not want; on
        # CUDA the worker of one device lives in the core's process anyway.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not cuda:
        # vLLM compiles its logprob ranks even when it is to be eager, for 20 s on a CPU at the first request. And a
        # variable that another engine left must not stop this one from compiling.
        os.environ["TORCHDYNAMO_DISABLE"] = "1" if config.enforce_eager else "0"


def engine_arguments(
    config: VllmConfig,
    *,
    folder: Path,
    dtype: torch.dtype,
    cuda: bool,
    random_seed: int | None,
    with_routes: bool = False,
) -> Any:
    """vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: `engine_options` holds what vLLM does not know.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    options: dict[str, Any] = {
        "model": str(folder),
        # Token ids go in and out; stop strings are ours.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": config.tp,
        "enable_expert_parallel": config.expert_parallel,
        # In an actor vLLM would choose Ray, and want actors of its own.
        "distributed_executor_backend": "mp" if config.tp > 1 else "uni",
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        # A teacher's engine gives as many of the likeliest tokens as algorithm.top_k asks for.
        "max_logprobs": -1,
        # vllm_sampler makes our rule of it.
        "logprobs_mode": "raw_logprobs",
        # The place where a sync fell into a response is known to the token.
        "stream_interval": 1,
        "load_format": "rlframe",
        "model_loader_extra_config": {} if random_seed is None else {"random_seed": random_seed},
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": True,
        "enable_return_routed_experts": with_routes,
    }
    if cuda:
        options |= {"enable_sleep_mode": True, "moe_backend": config.moe_backend.value}
    else:
        options |= {
            "kv_cache_memory_bytes": CPU_CACHE_BYTES,
            # vLLM 0.32 turns back the random numbers of a prompt that was read in part, by an offset that
            # generators on the CPU have not: the core would die.
            "enable_chunked_prefill": False,
        }
    known = {each.name for each in fields(AsyncEngineArgs)}
    if unknown := sorted(config.engine_options.keys() - known):
        raise ConfigError(
            [Fault("rollout.engine_options", said=f"this vLLM has no engine argument {name}") for name in unknown]
        )
    return AsyncEngineArgs(**(options | config.engine_options))


def keep_merged_routes() -> None:
    """Has vLLM keep the routed experts, which come with the last piece of a response, where it merges that with one
    that nobody has taken yet. 0.26 forgets them there; 0.32 does not."""
    from vllm.outputs import RequestOutput

    merge = RequestOutput.add

    def add(self: Any, next_output: Any, aggregate: bool) -> None:
        merge(self, next_output, aggregate)
        told = {each.index: each.routed_experts for each in next_output.outputs if each.routed_experts is not None}
        for completion in self.outputs:
            completion.routed_experts = told.get(completion.index, completion.routed_experts)

    RequestOutput.add = add


async def launch(arguments: Any) -> Any:
    """AsyncLLM, made in the loop it is to live in."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if arguments.enable_return_routed_experts:
        keep_merged_routes()
    return AsyncLLM.from_engine_args(arguments)
