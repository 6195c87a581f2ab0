"""The environment and the engine arguments with which vLLM starts."""

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlframe.models.config import ModelConfig
from rlframe.models.hub import read_config, resolve
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.models.remote_code import runs_config
from rlframe.rollout.base.adapter import EngineAdapter
from rlframe.rollout.base.speculative import SpeculativeConfig, SpeculativeMethod
from rlframe.rollout.served.cache import CPU_CACHE_BYTES
from rlframe.rollout.served.plain import is_quantized, plain_config
from rlframe.rollout.served.quantized import stated_format
from rlframe.rollout.vllm.config import COMPILATION_CONFIG, VllmConfig, slot_rank
from rlframe.rollout.vllm.decode.ahead import ENTRIES
from rlframe.rollout.vllm.decode.runner import choose_runner, is_measured, prefer_second, runs_first
from rlframe.rollout.vllm.warm_up import warm_up_values
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.process.early import STARTED, EarlyContext, EarlyProcess, EarlyProgram

logger = logging.getLogger(__name__)

WORKER = {True: ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner"), False: ("vllm.v1.worker.cpu_worker",)}
"""Modules of vLLM's workers, by whether they run on CUDA."""
WORKERS_START = "vllm.v1.executor.multiproc_executor"
"""Module of vLLM that starts the workers of several devices."""
EXTENSION = "rlframe.rollout.vllm.worker.RankExtension"
SCHEDULER = "rlframe.rollout.vllm.decode.scheduler.scheduler"
HEAD_IN_FLOAT32 = {"head_dtype": "float32"}
"""Entries of vLLM's `hf_overrides` that keep logits in float32: the weight stays as it is (vLLM 0.26 to 0.32,
`LogitsProcessor._apply_head`)."""
DEFAULTS = {
    # Ray decides how many cores a worker has; vLLM's own binding would place several engines on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Training runs send no usage reports to vLLM's authors.
    "VLLM_NO_USAGE_STATS": "1",
    # Inductor's kernels begin before the one ahead has ended, as those of `few_rows`, which may then ask for weights
    # early. Inductor does not do so on GPUs that cannot.
    "TORCHINDUCTOR_ENABLE_PDL": "1",
}
"""Environment variables of vLLM and its processes that users may set otherwise."""
LEAST_CLAIM = 0.01
"""Value of vLLM's `gpu_memory_utilization` beside a cache of a given size. vLLM then reads it for one check only: that
such a part of the device is free (vLLM 0.26 to 0.32, `request_memory`)."""


def early_program(config: VllmConfig, *, folder: Path, cuda: bool) -> EarlyProgram:
    """Returns what the process of vLLM's core begins with: it imports vLLM at once, as do the processes of its workers
    below it.

    vLLM makes its configuration and then starts its core in a new interpreter, which would begin with the import that
    this process has just done: 15 s after 15 s on a machine with an H200. Workers begin with it again, after the core:
    26 s on a machine with four.
    """
    known = architectures_in(folder)
    worker = f"from {__name__} import import_worker; import_worker({known!r}, cuda={cuda}, also={WORKERS_START!r})"
    return EarlyProgram(
        first=f"from {__name__} import import_core; import_core({known!r}, cuda={cuda})",
        below=(worker,) * config.num_worker_processes(cuda=cuda),
        environment=environment(config, cuda=cuda),
        defaults=DEFAULTS,
    )


def environment(config: VllmConfig, *, cuda: bool) -> dict[str, str]:
    """Returns the environment variables of vLLM and its processes. Most are read once, when vLLM is imported."""
    wanted = {
        # Ray's and rlframe's threads do not survive a fork.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Every request has a seed, for which vLLM never uses FlashInfer's sampler. It would only be compiled for the
        # warm-up, or fail there if it is missing.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if config.quantization is not EngineFormat.NONE:
        # DeepGEMM keeps scales in an order of its own, where weight sync does not write them. vLLM's CUTLASS kernels
        # and Triton's read weights and scales as they are loaded.
        wanted["VLLM_USE_DEEP_GEMM"] = "0"
    if not cuda and not config.num_worker_processes(cuda=cuda):
        # Otherwise vLLM starts an extra process for a CPU worker, only to bind its threads.
        wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not cuda:
        # vLLM compiles its logprob ranks whatever is asked, which takes 10 to 20 s on a CPU at the first request.
        # Setting the variable in both cases also overrides a value that another engine left.
        wanted["TORCHDYNAMO_DISABLE"] = "0" if config.compile and not config.enforce_eager else "1"
    return wanted


def engine_arguments(
    config: VllmConfig,
    *,
    folder: Path,
    dtype: torch.dtype,
    cuda: bool,
    random_seed: int | None,
    with_routes: bool = False,
    adapter: EngineAdapter | None = None,
    float32_logits: bool = False,
    with_mtp: bool = False,
) -> Any:
    """Returns vLLM's AsyncEngineArgs.

    Raises:
        ConfigError: `engine_options` holds an argument unknown to vLLM.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    loader = loader_settings(config, adapter, cuda=cuda) | {"random_seed": random_seed, "routes": with_routes}
    loader |= {"mtp": with_mtp} if drafts_with_head(config) else {}
    knows_routes = cuda and adapter is None and is_measured(architectures_in(folder), world_size=config.tp)
    choose_runner(first=config.speculative is not None or (with_routes and not knows_routes))
    prefer_second()
    options: dict[str, Any] = {
        "model": str(folder),
        # Requests and responses are token ids; rlframe matches stop strings itself.
        "skip_tokenizer_init": True,
        "trust_remote_code": runs_config(folder),
        "generation_config": "vllm",
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": config.tp,
        "enable_expert_parallel": config.expert_parallel,
        # vLLM would choose Ray inside a Ray actor, and create actors of its own.
        "distributed_executor_backend": "mp" if config.num_worker_processes(cuda=cuda) else "uni",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        # A teacher's engine returns as many of the most likely tokens as algorithm.top_k asks for.
        "max_logprobs": -1,
        # rlframe.rollout.vllm.sampling.sampler replaces this rule by rlframe's.
        "logprobs_mode": "raw_logprobs",
        # One token an output, so that a stop string is seen at the token that completes it.
        "stream_interval": 1,
        "load_format": "rlframe",
        "model_loader_extra_config": loader,
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
    }
    if cuda:
        options |= {"moe_backend": config.moe_backend.value, "additional_config": dict(ENTRIES)}
    else:
        # vLLM 0.32 rewinds the random generator after a partial prefill; CPU generators cannot, and the core dies.
        options |= {"enable_chunked_prefill": False}
    _require_known(config.engine_options, AsyncEngineArgs)
    options |= adapter_options(adapter) | speculative_options(config.speculative, tp=config.tp)
    options |= memory_options(config, cuda=cuda) | config.engine_options | compilation_options(config, cuda=cuda)
    return AsyncEngineArgs(**options | overrides(folder, config, float32_logits=float32_logits))


def compilation_options(config: VllmConfig, *, cuda: bool) -> dict[str, Any]:
    """Returns the argument that turns Inductor off, with the user's own entries. Nothing if `config` leaves it on, or
    if the user's argument is no mapping."""
    own = config.engine_options.get(COMPILATION_CONFIG, {})
    if config.compile or config.enforce_eager or not isinstance(own, Mapping):
        return {}
    return {COMPILATION_CONFIG: {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY" if cuda else "NONE"} | dict(own)}


def loader_settings(config: VllmConfig, adapter: EngineAdapter | None, *, cuda: bool) -> dict[str, Any]:
    """Returns settings of `worker.RecordingLoader`. Weights that nothing can reload must lie where they were loaded."""
    in_place = adapter is not None or config.quantization is not EngineFormat.NONE
    return {
        "share_prompts": config.share_prompts if cuda and config.reads_shared_once else False,
        "warm_up": warm_up_values(config.sampling()),
        "as_loaded": in_place and not cuda,
        "engine_format": config.quantization.value,
    }


def overrides(folder: Path, config: VllmConfig, *, float32_logits: bool) -> dict[str, Any]:
    """Returns the engine argument that changes config.json, the user's changes among them, or nothing."""
    changed = (config.engine_options.get("hf_overrides") or {}) | (HEAD_IN_FLOAT32 if float32_logits else {})
    changed |= stated_format(folder, config.quantization)
    if is_quantized(folder):
        return {"hf_overrides": partial(plain_config, overrides=changed)}
    return {"hf_overrides": changed} if changed else {}


def _require_known(options: Mapping[str, Any], arguments: Any) -> None:
    """Raises ConfigError if vLLM's class of arguments lacks some of the `options`."""
    known = {each.name for each in fields(arguments)}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(
            [Fault("rollout.engine_options", said=f"this vLLM has no engine argument {name}") for name in unknown]
        )


def adapter_options(adapter: EngineAdapter | None) -> dict[str, Any]:
    """Returns the engine arguments about adapters: one slot, of the policy."""
    if adapter is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(adapter.rank)}


def speculative_options(config: SpeculativeConfig | None, *, tp: int) -> dict[str, Any]:
    """Returns the engine arguments about speculative decoding. Drafts are greedy, which is vLLM's default."""
    if config is None:
        return {}
    options: dict[str, Any] = {"method": config.method.value, "num_speculative_tokens": config.num_tokens}
    if config.method is SpeculativeMethod.NGRAM:
        options |= {"prompt_lookup_min": config.min_match_tokens, "prompt_lookup_max": config.max_match_tokens}
    elif config.method is SpeculativeMethod.DRAFT_MODEL:
        assert config.model is not None, "the draft model is checked with the configuration"
        options |= {
            "model": str(resolve(ModelConfig(path=config.model), key="rollout.speculative.model")),
            "draft_tensor_parallel_size": tp,
        }
    # The check of drafts waits for the device and counts a request's tokens.
    scheduling = {"async_scheduling": False} if runs_first() else {}
    return {"speculative_config": options} | scheduling


def drafts_with_head(config: VllmConfig) -> bool:
    """Returns whether vLLM drafts with the checkpoint's head for multi-token prediction."""
    return config.speculative is not None and config.speculative.method is SpeculativeMethod.MTP


def memory_options(config: VllmConfig, *, cuda: bool) -> dict[str, Any]:
    """Returns the engine arguments about memory. With a cache of a given size vLLM measures none, so that processes of
    others may take and free memory of the device while it starts."""
    return {
        "enable_sleep_mode": cuda and config.sleeps,
        "kv_cache_dtype": config.kv_cache_dtype.value,
        "gpu_memory_utilization": config.gpu_memory_utilization if config.measures_memory else LEAST_CLAIM,
        "kv_cache_memory_bytes": config.cache_bytes or (None if cuda else CPU_CACHE_BYTES),
    }


def architectures_in(folder: Path) -> list[str]:
    """Returns the names of the model's class in its config.json."""
    return [each for each in read_config(folder).get("architectures") or [] if isinstance(each, str)]


def register_here(architectures: Iterable[str]) -> None:
    """Imports the model's class in this process, so that vLLM asks that class what it can do.

    vLLM would start an interpreter for the question, which imports all of vLLM and then ends: 17 of the 100 seconds in
    which an H200 machine without caches started an engine. It does so because its own processes may be forks, in which
    CUDA must be untouched; ours are spawned.

    Args:
        architectures: see `architectures_in`.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def import_core(architectures: Sequence[str], *, cuda: bool) -> None:
    """Imports what vLLM's core needs: vLLM, its worker, and the class of the model. Its workers will be the early
    processes of this one, if there are any."""
    import_worker(architectures, cuda=cuda, also="vllm.v1.engine.core")
    if STARTED:
        replace_context(WORKERS_START, partial(EarlyContext, tuple(STARTED)))


def import_worker(architectures: Sequence[str], *, cuda: bool, also: str) -> None:
    """Imports what a worker of vLLM needs: its modules, those of rlframe, and the class of the model.

    Args:
        also: a module besides.
    """
    for module in (also, "vllm.v1.executor.uniproc_executor", "rlframe.rollout.vllm.worker", *WORKER[cuda]):
        importlib.import_module(module)
    register_here(architectures)


def replace_context(module: str, context: Callable[[], EarlyContext]) -> None:
    """Makes a module of vLLM start its processes by another context of multiprocessing.

    vLLM 0.26 to 0.32 offer `fork` and `spawn` only (`vllm.utils.system_utils.get_mp_context`). Not needed any more once
    vLLM can be told which context to use.
    """
    starts = vars(importlib.import_module(module))
    assert callable(starts.get("get_mp_context")), f"{module} starts processes in another way than vLLM 0.26 to 0.32"
    starts["get_mp_context"] = context


async def launch(arguments: Any, early: EarlyProcess) -> Any:
    """Creates an AsyncLLM in the asyncio loop it will live in, with its core in `early`.

    vLLM's tokens of one step (`max_num_batched_tokens`) depend on who asks: 16,384 for its own batches of prompts on an
    H100, 2,048 for an AsyncLLM, which took 22 steps for prompts of 43,520 tokens instead of 3 (vLLM 0.26 and 0.32,
    `EngineArgs.get_batch_defaults`). Rollouts are such batches.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    replace_context("vllm.v1.engine.utils", early.context)
    engine = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    if not early.used:
        logger.warning("vLLM's core was started anew, which takes longer: the process %d did not fit", early.pid)
    return engine
