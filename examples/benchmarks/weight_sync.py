"""Seconds of a weight sync into vLLM on GPUs, proof included, beside the floors measured in the same run.

    python examples/benchmarks/weight_sync.py 4b_copy --output result.json
    python examples/benchmarks/weight_sync.py 4b_adapter --output result.json
    python examples/benchmarks/weight_sync.py 4b_bf16 4b_fp8 4b_fp8_cache --output result.json
    python examples/benchmarks/weight_sync.py 30b_ep2 30b_tp2 30b_split --output result.json
    python examples/benchmarks/weight_sync.py 30b_ep4 30b_tp4 30b_2_2 235b_cut --output result.json      # four GPUs
    python examples/benchmarks/weight_sync.py 235b --output result.json                             # eight of 141 GB

The engine is rlframe's own vLLM engine in its Ray actor, CUDA graphs on, weights random. The trainer side holds the
parameters that Megatron ranks of the layout hold, in Megatron's shapes and in one buffer, as its data-parallel wrapper
keeps them; optimizer and gradients are left out, so that the largest model fits beside its engine. Before every sync
the parameters change, so that each sync has something to prove. `peak_bytes` is the most that nvidia-smi says of each
device, 20 times a second, in all of a case.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np
import torch
from device_memory import Memory
from models_by_size import MODELS, make_model
from weight_sync_parts import BenchmarkSources, adapter_of, floors

from rlframe.cluster import runtime
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import Placement, reserve
from rlframe.cluster.roles import Topology, engines, policy
from rlframe.megatron.config.lora import LoraConfig
from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat, EngineDtype
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import EngineWorker, RolloutSetup
from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.rollout import GenerationRequest, SamplingParams
from rlframe.utils.registry import find
from rlframe.weight_sync.adapters import AdapterSync
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.channel import SyncReport, WeightSync
from rlframe.weight_sync.config import WeightSyncConfig
from rlframe.weight_sync.plan.planner import LinkSpeeds

REPEATS = {"reload": 1}
"""Syncs by transport; a stream takes many seconds."""
MOST_REPEATS = 7
"""Syncs where REPEATS says nothing; the first is left out of the medians."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 64]}
"""vLLM's compilation: CUDA graphs of whole decode steps; no Inductor, whose compile time would be most of the run."""


CACHE_GB = 2.0
"""Of vLLM's key-value cache, which these runs hardly use."""
SAMPLED_CACHE_GB = 6.0
"""The same where responses are sampled."""
RESPONSE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, and the syncs into it."""

    model: str
    num_layers: int = 0
    """Layers that are left of the model. 0: all."""
    tp: int
    expert_parallel: bool = False
    colocate: bool
    syncs: tuple[tuple[str, str], ...]
    """(layout of the trainer, transport)."""
    lora: LoraConfig | None = None
    """Adapters, which are then sent alone."""
    engine_format: EngineFormat = EngineFormat.NONE
    cache_format: CacheFormat = CacheFormat.AUTO
    responses: int = 0
    """Responses of RESPONSE_TOKENS that are sampled at once after the syncs, and timed."""


SAMPLED = Case(model="qwen3_4b", tp=1, colocate=True, syncs=(("d1", "cuda_ipc"),), responses=64)
FP8 = EngineFormat.FP8_BLOCK
CASES = {
    "4b_bf16": SAMPLED,
    "4b_fp8": replace(SAMPLED, engine_format=FP8),
    "4b_fp8_cache": replace(SAMPLED, engine_format=FP8, cache_format=CacheFormat.FP8),
    "30b_fp8": Case(model="qwen3_30b_a3b", tp=1, colocate=False, syncs=(("d1", "cuda_ipc"),), engine_format=FP8),
    "4b_copy": Case(model="qwen3_4b", tp=1, colocate=True, syncs=(("d1", "cuda_ipc"), ("d1", "reload"))),
    "4b_adapter": Case(
        model="qwen3_4b",
        tp=1,
        colocate=True,
        syncs=(("d1", "cuda_ipc"),),
        lora=LoraConfig(rank=32),
    ),
    "30b_ep2": Case(
        model="qwen3_30b_a3b",
        tp=2,
        expert_parallel=True,
        colocate=True,
        syncs=(("d2|ffn:d1t1e2", "cuda_ipc"),),
    ),
    "30b_tp2": Case(
        model="qwen3_30b_a3b",
        tp=2,
        colocate=True,
        syncs=(("d2|ffn:d1t1e2", "cuda_ipc"), ("d1p2", "cuda_ipc")),
    ),
    "30b_split": Case(
        model="qwen3_30b_a3b", tp=1, colocate=False, syncs=(("d1", "cuda_ipc"), ("d1", "nccl"), ("d1", "reload"))
    ),
    "30b_ep4": Case(
        model="qwen3_30b_a3b", tp=4, expert_parallel=True, colocate=True, syncs=(("d4|ffn:d1t1e4", "cuda_ipc"),)
    ),
    "30b_tp4": Case(
        model="qwen3_30b_a3b",
        tp=4,
        colocate=True,
        syncs=(("d4|ffn:d1t1e4", "cuda_ipc"), ("d1t2p2|ffn:d1t1e2p2", "cuda_ipc"), ("d4|ffn:d1t1e4", "reload")),
    ),
    "30b_2_2": Case(
        model="qwen3_30b_a3b",
        tp=2,
        colocate=False,
        syncs=(("d2|ffn:d1t1e2", "cuda_ipc"), ("d2|ffn:d1t1e2", "nccl")),
    ),
    # What two copies of a model of 94 layers leave on four devices of 80 GB.
    "235b_cut": Case(
        model="qwen3_235b_a22b",
        num_layers=24,
        tp=4,
        expert_parallel=True,
        colocate=True,
        syncs=(("d4|ffn:d1t1e4", "cuda_ipc"),),
    ),
    # Two copies of 470 GB on eight devices of 141 GB.
    "235b": Case(
        model="qwen3_235b_a22b",
        tp=8,
        expert_parallel=True,
        colocate=True,
        syncs=(("d2t4|ffn:d1t1e8", "cuda_ipc"), ("d1t4p2|ffn:d1t1e4p2", "cuda_ipc")),
    ),
    "tiny": Case(
        model="tiny_moe", tp=1, colocate=True, syncs=(("d1", "cuda_ipc"), ("d1", "reload"))
    ),
    "tiny_split": Case(
        model="tiny_moe", tp=1, colocate=False, syncs=(("d1", "cuda_ipc"), ("d1", "nccl"), ("d1", "reload"))
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--output", type=Path, default=Path("weight_sync.json"))
    parser.add_argument("--logs", type=Path, default=None, help="folder for the workers' logs")
    arguments = parser.parse_args()
    speeds = floors()
    result: dict[str, Any] = {"machine": machine(), "floors_gb_per_s": asdict(speeds), "cases": {}}
    print(json.dumps(result), flush=True)
    for name in arguments.cases:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            memory = stack.enter_context(Memory()) if which("nvidia-smi") else None
            case = run_case(CASES[name], folder, arguments.logs or folder / "logs", speeds, stack)
            result["cases"][name] = case | {"peak_bytes": memory.most() if memory else {}}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def run_case(case: Case, folder: Path, logs: Path, speeds: LinkSpeeds, stack: ExitStack) -> dict[str, Any]:
    """Start the engine once; then each trainer layout and transport in turn."""
    config = MODELS[case.model] | ({"num_hidden_layers": case.num_layers} if case.num_layers else {})
    model = ModelConfig(path=str(make_model(config, folder / "model")), random_init=True)
    ranks = max(Parallel.parse(train).world for train, _ in case.syncs)
    topology = Topology((policy(ranks), engines(1, devices_per_engine=case.tp, colocate=case.colocate)))
    cluster = ClusterConfig()
    stack.enter_context(runtime.running(cluster, num_devices=topology.num_devices))
    placement = reserve(topology, gpu=True, timeout_s=cluster.start_timeout_s)
    stack.callback(placement.release)
    begun = time.perf_counter()
    rollout = start_engine(case, model, placement, logs)
    engine = rollout.workers.actors[0]
    stack.callback(lambda: rollout.workers.wait([engine.close.remote()], doing="close"))
    outcome: dict[str, Any] = {"case": asdict(case), "engine_start_s": time.perf_counter() - begun, "syncs": []}
    changes = 0
    for train, transport in case.syncs:
        # What the engine holds by now: random weights, changed by every sync so far.
        parallel = Parallel.parse(train)
        sources = BenchmarkSources(
            model, parallel, placement, logs, changes=changes, lora=case.lora, engine_format=case.engine_format
        )
        try:
            outcome["syncs"].append(
                {"train": train} | measure(sources, rollout, transport, speeds, alone=bool(case.lora))
            )
            changes += outcome["syncs"][-1]["syncs"]
        finally:
            if error := sys.exception():
                # An engine that has died fails `close` too, whose error would be the only one shown.
                traceback.print_exception(error)
            # Memory that an engine still maps outlives the process it belongs to.
            rollout.call(DestinationRank.close)
            sources.stop()
        print(json.dumps(outcome["syncs"][-1]), flush=True)
    if case.responses:
        outcome["tokens_per_s"] = sampling_speed(rollout, case.responses)
        print(json.dumps({"tokens_per_s": outcome["tokens_per_s"]}), flush=True)
    return outcome


def sampling_speed(rollout: RolloutGroup, responses: int) -> list[float]:
    """Tokens per second of batches of responses to short prompts. The first has warmed up."""
    sampling = SamplingParams(max_tokens=RESPONSE_TOKENS, min_tokens=RESPONSE_TOKENS)
    speeds = []
    for batch in range(4):
        requests = [
            GenerationRequest(input=ModelInput(np.arange(5, 69) + index), sampling=sampling, seed=1000 * batch + index)
            for index in range(responses)
        ]
        begun = time.perf_counter()
        asked = rollout.workers.ask(0, EngineWorker.generate, Packed(requests))
        rollout.workers.wait([asked], doing="generate", ranks=[0])
        speeds.append(responses * RESPONSE_TOKENS / (time.perf_counter() - begun))
    return speeds[1:]


def engine_settings(case: Case) -> Any:
    """The settings of the engine."""
    _, config = find("rlframe.rollout", "vllm", key="rollout.name")
    return config(
        name="vllm",
        tp=case.tp,
        expert_parallel=case.expert_parallel,
        max_tokens=64,
        max_model_len=1024,
        kv_cache_gb=SAMPLED_CACHE_GB if case.responses else CACHE_GB,
        quantization=case.engine_format,
        kv_cache_dtype=case.cache_format,
        engine_options={
            "compilation_config": GRAPHS,
            "max_num_batched_tokens": 1024,
        },
    )


def start_engine(case: Case, model: ModelConfig, placement: Placement, logs: Path) -> RolloutGroup:
    """One vLLM engine on its devices."""
    setup = RolloutSetup(
        rollout=engine_settings(case),
        model=model,
        dtype=EngineDtype.BFLOAT16,
        device=Device.CUDA,
        seed=0,
        adapter=adapter_of(model, case.lora) if case.lora else None,
    )
    rollout = RolloutGroup(
        setup,
        slots=placement.engines,
        log_folder=str(logs),
        num_threads=8,
        start_timeout_s=900,
        call_timeout_s=600,
    )
    rollout.start()
    return rollout


def measure(
    sources: BenchmarkSources, rollout: RolloutGroup, transport: str, speeds: LinkSpeeds, *, alone: bool
) -> dict[str, Any]:
    """Plan once, then sync several times; seconds of each part. The first sync is left out of the medians.

    Args:
        alone: only adapters are sent.
    """
    config = WeightSyncConfig(transport=transport)
    if alone:
        sync = AdapterSync(sources, sources.adapters(), rollout, config)
    else:
        sync = WeightSync(sources, rollout, config)
    begun = time.perf_counter()
    plan = sync.connect()
    connected = time.perf_counter()
    sync.calibrate(version=0)
    calibrated = time.perf_counter()
    reports: list[SyncReport] = []
    quantize_s = []
    for step in range(1, REPEATS.get(transport, MOST_REPEATS) + 1):
        quantize_s.append(sources.change())
        reports.append(sync.publish(version=step))
    request = GenerationRequest(input=ModelInput(np.array([5, 6, 7])), sampling=SamplingParams(max_tokens=8), seed=0)
    asked = rollout.workers.ask(0, EngineWorker.generate, Packed([request]))
    (answers,) = rollout.workers.wait([asked], doing="generate", ranks=[0])
    (completion,) = answers.objects()
    parts = ("pause_s", "pull_s", "verify_s", "total_s")
    warm = reports[1:] or reports
    return {
        "transport": reports[0].transport,
        "syncs": len(reports),
        "floor_s": plan.floor_s(speeds),
        "record_s": {
            "trainer": max(sources.record_s),
            "engine": max(info.record_s for info in rollout.call(DestinationRank.describe)),
        },
        "quantize_s": statistics.median(quantize_s),
        "connect_s": connected - begun,
        "calibrate_s": calibrated - connected,
        "bytes": plan.total_bytes,
        "copies": sum(len(copies) for copies in plan.copies),
        "link_bytes": {f"{source}->{engine}": size for (source, engine), size in plan.link_bytes.items()},
        "first": {part: getattr(reports[0], part) for part in parts},
        "median": {part: statistics.median(getattr(report, part) for report in warm) for part in parts},
        "best": {part: min(getattr(report, part) for report in warm) for part in parts},
        "sampled_at_version": int(completion.versions[-1]),
    }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    packages = {}
    for name in ("torch", "vllm", "sglang", "sglang-kernel", "triton", "ray", "nvidia-nccl-cu13"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"gpus": gpus, "python": platform.python_version(), "packages": packages, "date": date}


if __name__ == "__main__":
    main()
