"""The environment, engine arguments and process with which SGLang starts."""

import importlib.util
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import torch

from rlframe.models.families.base import Architecture
from rlframe.models.remote_code import runs_config
from rlframe.rollout.base.config import CacheFormat
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.served.cache import CPU_CACHE_BYTES, token_bytes
from rlframe.rollout.served.plain import overrides_of
from rlframe.rollout.served.quantized import stated_format
from rlframe.rollout.sglang.border import EngineHost
from rlframe.rollout.sglang.config import SglangConfig
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import ConfigError, EngineDied, RlframeError
from rlframe.utils.faults import Fault

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FREE_FRACTION = 0.9
"""Value of SGLang's `mem_fraction_static` beside a cache of a given size: the part of the free memory that the weights
and the cache may take at most."""
ROOM = 8
"""Number of positions that SGLang reserves: a sequence must be shorter than its context length by 1 to 6 tokens."""
CACHES = {CacheFormat.AUTO: "auto", CacheFormat.FP8: "fp8_e4m3"}
"""SGLang's names of number formats of the key-value cache."""
CLOSE_S = 10.0
"""Seconds that the process may take to end after the connection is closed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The first message to the process."""

    arguments: dict[str, Any]
    """Arguments of SGLang's ServerArgs."""
    stop_tokens: list[int]
    """The end-of-sequence tokens."""
    tokenizer: str
    """Folder of the tokenizer. It is read if a request has stop strings."""
    trusted: bool
    """Whether the folder's own code may run."""
    routers: Routers | None = None
    """Routers of the model, if completions carry routed experts. None otherwise."""


def engine_arguments(
    config: SglangConfig,
    *,
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    cuda: bool,
    stop_tokens: list[int],
    random_seed: int | None,
    with_routes: bool = False,
    float32_logits: bool = False,
) -> dict[str, Any]:
    """Returns the arguments of SGLang's ServerArgs.

    Raises:
        ConfigError: SGLang cannot compute in `dtype`, or on so many devices, on this kind of device.
    """
    refuse_device(config, dtype=dtype, cuda=cuda)
    max_length = config.max_model_len or architecture.max_positions
    options: dict[str, Any] = {
        "model_path": str(folder),
        # Requests and responses are token ids; rlframe matches stop strings itself.
        "skip_tokenizer_init": True,
        "trust_remote_code": runs_config(folder),
        # Ignores the model's generation config.
        "sampling_defaults": "openai",
        "dtype": str(dtype).removeprefix("torch."),
        "tp_size": config.tp,
        "ep_size": config.tp if config.expert_parallel else 1,
        "context_length": max_length + ROOM,
        "max_running_requests": config.max_num_seqs,
        "disable_cuda_graph": config.enforce_eager or not cuda,
        "disable_radix_cache": not config.enable_prefix_caching,
        "grammar_backend": "none",
        "kv_cache_dtype": CACHES[config.cache_format],
        # The other backends assert that no request has a seed.
        "sampling_backend": "pytorch",
        "model_loader_extra_config": json.dumps({"rlframe": loader_settings(config, random_seed, stop_tokens)}),
        # Otherwise a scheduler without requests keeps a core busy.
        "sleep_on_idle": True,
        "enable_return_routed_experts": with_routes,
        "enable_fp32_lm_head": float32_logits,
        "log_level": "warning",
    }
    if cuda:
        options |= {
            "mem_fraction_static": config.gpu_memory_utilization if config.measures_memory else FREE_FRACTION,
            "enable_memory_saver": config.sleeps,
            "enable_weights_cpu_backup": config.sleep_level == 1,
        }
    else:
        options |= {"device": "cpu", "attention_backend": "torch_native"}
    if cache_bytes := config.cache_bytes or (None if cuda else CPU_CACHE_BYTES):
        itemsize = config.cache_format.itemsize(dtype.itemsize)
        tokens = int(cache_bytes / token_bytes(architecture, tp=config.tp, itemsize=itemsize))
        options |= {"max_total_tokens": max(tokens, max_length + ROOM)}
    options |= config.engine_options
    if changed := overrides(folder, config):
        options["json_model_override_args"] = json.dumps(changed)
    return options


def loader_settings(config: SglangConfig, random_seed: int | None, stop_tokens: list[int]) -> dict[str, Any]:
    """Returns settings of `worker.RecordingLoader` and of the sampler."""
    return {
        "random_seed": random_seed,
        "stop_tokens": stop_tokens,
        "engine_format": config.engine_format.value,
        "cache_format": config.cache_format.value,
    }


def overrides(folder: Path, config: SglangConfig) -> dict[str, Any]:
    """Returns the changes of config.json, with the user's, or nothing if there are only the user's."""
    plain, stated = overrides_of(folder), stated_format(folder, config.quantization)
    if not plain and not stated:
        return {}
    given = json.loads(config.engine_options.get("json_model_override_args") or "{}")
    inner = {"text_config": given.get("text_config", {}) | plain["text_config"]} if "text_config" in plain else {}
    return given | plain | inner | stated


def refuse_device(config: SglangConfig, *, dtype: torch.dtype, cuda: bool) -> None:
    """Refuses combinations at which SGLang would fail with an assertion of its own, after it has loaded the model.

    Raises:
        ConfigError: float32 on CUDA, or more than one rank on a CPU.
    """
    if cuda and dtype == torch.float32:
        # SGLang 0.5.17: its norms, rotary embedding and flash attention have kernels for 16 bits only.
        raise ConfigError(
            [Fault("rollout.dtype", "must be bfloat16 for SGLang on CUDA, which has no float32 kernels", got="float32")]
        )
    if not cuda and config.tp > 1:
        # SGLang 0.5.23 starts a rank for each NUMA node; with expert parallelism it requires an accelerator.
        raise ConfigError(
            [Fault("rollout.tp", "must be 1 for SGLang on a CPU", got=config.tp, hint="use rollout.num_engines")]
        )


class Host:
    """Starts and calls the process that runs `sglang.Engine` (`rlframe.rollout.sglang.host`). Thread-safe."""

    def __init__(self, launch: Launch, *, doing: str):
        """Starts the process and waits until the model is loaded.

        Args:
            doing: name of the engine in the message of its death.

        Raises:
            ConfigError: `engine_options` holds an argument unknown to SGLang.
            EngineDied: SGLang did not start; its messages are in this process's log.
        """
        assert importlib.util.find_spec("sglang") is not None, "rollout.name=sglang is checked with the configuration"
        ours, theirs = socket.socketpair()
        # Lets a sequence use all positions of the model. `ROOM` lies beyond them and is never reached.
        environment = os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        # SGLang sets 0 if the variable is unset. A communicator with trainers needs the same kind of memory on both
        # sides, and trainers use NCCL's default, -2.
        environment.setdefault("NCCL_CUMEM_ENABLE", "-2")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlframe.rollout.sglang.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._doing = doing
        self._lock = threading.Lock()
        self._number = 0
        started: Future[Any] = Future()
        self._calls: dict[int, Future[Any]] = {0: started}
        """Futures of unanswered calls, by number."""
        self.is_alive = True
        """False after the process has ended."""
        self._connection.send_bytes(pickle.dumps(launch))
        threading.Thread(target=self._read, name="sglang-answers", daemon=True).start()
        try:
            started.result()
        except RlframeError:
            self.close()
            raise

    def call(self, method: Callable[[EngineHost, *Ts], Coroutine[Any, Any, T]], *arguments: *Ts) -> "Future[T]":
        """Sends a call and returns the future of its answer.

        Raises:
            EngineDied: through the future.
        """
        future: Future[T] = Future()
        with self._lock:
            if not self.is_alive:
                future.set_exception(self._died(method.__name__))
                return future
            self._number += 1
            self._calls[self._number] = future
            try:
                self._connection.send_bytes(pickle.dumps((self._number, RankCall.of(method, *arguments))))
            except OSError:
                self._calls.pop(self._number)
                future.set_exception(self._died(method.__name__))
        return future

    def _read(self) -> None:
        try:
            while True:
                number, result, failure = pickle.loads(self._connection.recv_bytes())
                with self._lock:
                    future = self._calls.pop(number)
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)
        except (EOFError, OSError):
            with self._lock:
                self.is_alive = False
                left, self._calls = self._calls, {}
            for future in left.values():
                future.set_exception(self._died("a call"))

    def _died(self, during: str) -> EngineDied:
        return EngineDied(f"{self._doing} died during {during}; see SGLang's messages above in this worker's log")

    def close(self) -> None:
        """Ends the process and the processes it started."""
        if self.is_alive:
            # The other end reads end-of-file and shuts SGLang down.
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
