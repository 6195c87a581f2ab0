"""Rollout tokens per second, weight sync and sleep of an engine on one GPU, beside floors measured in the same run.

    python examples/benchmarks/engines.py vllm --output result.json
    python examples/benchmarks/engines.py sglang --output result.json
    python examples/benchmarks/engines.py sglang --quantization fp8_block --output result.json
    python examples/benchmarks/engines.py sglang --cache fp8 --prompt 4096 --output result.json

The second command adds its engine to the first one's file: the two need other releases of some packages, and may have
an environment each. Both get the same requests through rlframe's own engines in their Ray actors: 256 prompts of 512
random tokens, or as many as `--prompt` says, no two alike, and 512 tokens sampled for each, whatever they are; before
each batch the prefix cache is emptied, as a weight sync does. Weights are random and arrive by a weight sync from a
trainer's parameters on the same GPU (see weight_sync.py). CUDA graphs cover decoding; prefill is eager.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS, make_model
from weight_sync import machine, measure
from weight_sync_parts import BenchmarkSources, floors

from rlframe.cluster import runtime
from rlframe.cluster.config import ClusterConfig, Device
from rlframe.cluster.placement import Placement, reserve
from rlframe.cluster.roles import Topology, engines, policy
from rlframe.megatron.config.parallel import Parallel
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config
from rlframe.models.quantized.blocks import EngineFormat
from rlframe.rollout.base.config import CacheFormat, EngineDtype
from rlframe.rollout.fleet.group import RolloutGroup
from rlframe.rollout.fleet.worker import RolloutSetup
from rlframe.rollout.served.cache import token_bytes
from rlframe.types.input import ModelInput
from rlframe.types.packed import Packed
from rlframe.types.rollout import GenerationRequest, SamplingParams
from rlframe.utils.registry import find
from rlframe.weight_sync.border import DestinationRank
from rlframe.weight_sync.plan.planner import LinkSpeeds

NUM_REQUESTS, RESPONSE_TOKENS = 256, 512
REPEATS = 3
"""Timed batches, unless `--repeats` says how many, after one that warms up; and requests alone."""
SIZES = [1, 2, 4, *range(8, NUM_REQUESTS + 1, 8)]
"""Batches for which decoding has a CUDA graph."""
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}},
    "vllm-compiled": {},
    "sglang": {"cuda_graph_bs_decode": SIZES, "disable_prefill_cuda_graph": True},
    "sglang-default": {},
    "sglang-triton": {
        "cuda_graph_bs_decode": SIZES,
        "disable_prefill_cuda_graph": True,
        "decode_attention_backend": "triton",
        "prefill_attention_backend": "triton",
    },
}
"""Engine arguments by case. `vllm-compiled` and `sglang-default` are what the engine does when it is told nothing: vLLM
compiles with Inductor, which `rollout.compile` asks for, SGLang has CUDA graphs of prefill too."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=OPTIONS)
    parser.add_argument("--model", choices=MODELS, default="qwen3_4b")
    parser.add_argument("--memory", type=float, default=0.6, help="the engine's gpu_memory_utilization")
    parser.add_argument(
        "--quantization",
        choices=EngineFormat,
        type=EngineFormat,
        default=EngineFormat.NONE,
        help="rollout.quantization of the engine; its result has it in its name",
    )
    parser.add_argument(
        "--cache",
        choices=CacheFormat,
        type=CacheFormat,
        default=CacheFormat.AUTO,
        help="rollout.kv_cache_dtype of the engine; its result has it in its name",
    )
    parser.add_argument(
        "--prompt", type=int, default=512, help="tokens of a prompt; other results have it in their name"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed batches")
    parser.add_argument("--syncs", nargs="+", default=["cuda_ipc"], help="transports of weight sync, in turn")
    parser.add_argument("--output", type=Path, default=Path("engines.json"))
    parser.add_argument("--logs", type=Path, default=None, help="folder for the workers' logs")
    arguments = parser.parse_args()
    result = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"engines": {}}
    speeds, tflops = floors(), matmul_tflops()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outcome = run(arguments, folder, speeds, tflops, stack)
    result |= {"model": arguments.model, "requests": [NUM_REQUESTS, parser.get_default("prompt"), RESPONSE_TOKENS]}
    quantized = "" if arguments.quantization is EngineFormat.NONE else f"-{arguments.quantization}"
    cache = "" if arguments.cache is CacheFormat.AUTO else f"-cache-{arguments.cache}"
    prompt = "" if arguments.prompt == parser.get_default("prompt") else f"-prompt-{arguments.prompt}"
    result["engines"][arguments.case + quantized + cache + prompt] = {
        "machine": machine(),
        "copy_gb_per_s": speeds.device,
        "matmul_tflops": tflops,
    } | outcome
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def matmul_tflops(size: int = 8192) -> float:
    """Best of ten bfloat16 products of random square matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    seconds = []
    for _ in range(13):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        left @ right
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    del left, right
    torch.cuda.empty_cache()
    return 2 * size**3 / min(seconds[3:]) / 1e12


def run(
    arguments: argparse.Namespace, folder: Path, speeds: LinkSpeeds, tflops: float, stack: ExitStack
) -> dict[str, Any]:
    """Start the engine, sync its weights, and let it sample and sleep."""
    model = ModelConfig(path=str(make_model(MODELS[arguments.model], folder / "model")), random_init=True)
    logs, cluster = arguments.logs or folder / "logs", ClusterConfig()
    stack.enter_context(runtime.running(cluster, num_devices=1))
    topology = Topology((policy(1), engines(1, colocate=True)))
    placement = reserve(topology, gpu=True, timeout_s=cluster.start_timeout_s)
    stack.callback(placement.release)
    begun = time.perf_counter()
    rollout = start_engine(arguments, model, placement, logs)
    engine = rollout.workers.actors[0]
    stack.callback(lambda: rollout.workers.wait([engine.close.remote()], doing="close"))
    outcome: dict[str, Any] = {"options": OPTIONS[arguments.case], "memory": arguments.memory}
    outcome |= {"start_s": time.perf_counter() - begun, "syncs": []}
    changes = 0
    for transport in arguments.syncs:
        sources = BenchmarkSources(
            model, Parallel.parse("d1"), placement, logs, changes=changes, engine_format=arguments.quantization
        )
        try:
            outcome["syncs"].append(measure(sources, rollout, transport, speeds, alone=False))
            changes += outcome["syncs"][-1]["syncs"]
        finally:
            rollout.call(DestinationRank.close)
            sources.stop()
        print(json.dumps(outcome["syncs"][-1]), flush=True)
    print(f"after {time.perf_counter() - begun:.0f} s: batches", flush=True)
    outcome["rollout"] = sample(rollout, model, arguments.prompt, arguments.repeats)
    outcome["floor_s"] = floor_s(arguments, Path(model.path), speeds, tflops)
    outcome["single"] = single(rollout, model, arguments.prompt)
    outcome["sleep"] = sleep_and_wake(rollout)
    print(json.dumps({key: outcome[key] for key in ("rollout", "floor_s", "single", "sleep")}), flush=True)
    return outcome


def start_engine(arguments: argparse.Namespace, model: ModelConfig, placement: Placement, logs: Path) -> RolloutGroup:
    """One engine on the GPU."""
    name = arguments.case.split("-")[0]
    _, config = find("rlframe.rollout", name, key="rollout.name")
    settings = config(
        name=name,
        max_tokens=RESPONSE_TOKENS,
        max_model_len=2 * (arguments.prompt + RESPONSE_TOKENS),
        max_num_seqs=NUM_REQUESTS,
        gpu_memory_utilization=arguments.memory,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.cache,
        engine_options=OPTIONS[arguments.case],
        **({"compile": True} if arguments.case == "vllm-compiled" else {}),
    )
    setup = RolloutSetup(rollout=settings, model=model, dtype=EngineDtype.BFLOAT16, device=Device.CUDA, seed=0)
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


def requests(model: ModelConfig, count: int, prompt: int, response: int, seed: int) -> list[GenerationRequest]:
    """Random prompts of `prompt` tokens; every response has `response`."""
    generator = random.Random(seed)
    vocabulary = read_config(Path(model.path))["vocab_size"]
    sampling = SamplingParams(max_tokens=response, min_tokens=response)
    return [
        GenerationRequest(
            input=ModelInput(tuple(generator.randrange(3, vocabulary) for _ in range(prompt))),
            sampling=sampling,
            seed=seed * count + index,
        )
        for index in range(count)
    ]


def timed(rollout: RolloutGroup, batch: list[GenerationRequest]) -> float:
    """Seconds from the call of the engine's actor until it has returned every completion. Its prefix cache is empty."""
    engine = rollout.workers.actors[0]
    for method in (engine.pause, engine.resume):
        rollout.workers.wait([method.remote()], doing="empty the prefix cache")
    begun = time.perf_counter()
    (answers,) = rollout.workers.wait([engine.generate.remote(Packed(batch))], doing="generate")
    seconds = time.perf_counter() - begun
    assert all(
        len(each.token_ids) == request.sampling.max_tokens
        for each, request in zip(answers.objects(), batch, strict=True)
    ), "all responses are full"
    return seconds


def sample(rollout: RolloutGroup, model: ModelConfig, prompt: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of the whole batch, prefill and all."""
    batches = (requests(model, NUM_REQUESTS, prompt, RESPONSE_TOKENS, seed) for seed in range(repeats + 1))
    seconds = [timed(rollout, batch) for batch in batches]
    median = statistics.median(seconds[1:])
    tokens = NUM_REQUESTS * RESPONSE_TOKENS
    return {"warmup_s": seconds[0], "all_s": seconds[1:], "median_s": median, "tokens_per_s": tokens / median}


def single(rollout: RolloutGroup, model: ModelConfig, prompt: int) -> dict[str, float]:
    """Milliseconds of a decode step of one request alone: a response of RESPONSE_TOKENS less one of 1 token."""
    long, short = (
        statistics.median(timed(rollout, requests(model, 1, prompt, length, 100 + seed)) for seed in range(REPEATS))
        for length in (RESPONSE_TOKENS, 1)
    )
    return {"step_ms": (long - short) / (RESPONSE_TOKENS - 1) * 1e3, "first_token_ms": short * 1e3}


def floor_s(arguments: argparse.Namespace, folder: Path, speeds: LinkSpeeds, tflops: float) -> dict[str, float]:
    """Seconds below which the batch cannot come: the prompts' matrix products at the speed of one in bfloat16, then for
    each token the weights and all keys and values read once, at the speed of a copy, which reads and writes."""
    family = load_family(folder)
    shape = family.architecture(read_config(folder))
    numbers = {name: torch.Size(size).numel() for name, size in family.tensors(shape).items()}
    # The output layer is read in every step; a row for each token of the embedding is next to nothing.
    weights = sum(count for name, count in numbers.items() if shape.tie_embeddings or "embed_tokens" not in name)
    layers = sum(count for name, count in numbers.items() if ".layers." in name)
    weight_bytes = 2 * weights - (layers if arguments.quantization is not EngineFormat.NONE else 0)
    cached_bytes = token_bytes(shape, tp=1, itemsize=arguments.cache.itemsize(2))
    reads = 2 * speeds.device * 1e9
    prefill = 2 * layers * NUM_REQUESTS * arguments.prompt / (tflops * 1e12)
    steps = range(arguments.prompt, arguments.prompt + RESPONSE_TOKENS)
    decode = sum(weight_bytes + NUM_REQUESTS * length * cached_bytes for length in steps) / reads
    total = prefill + decode
    return {
        "prefill": prefill,
        "decode": decode,
        "total": total,
        "tokens_per_s": NUM_REQUESTS * RESPONSE_TOKENS / total,
        "single_step_ms": weight_bytes / reads * 1e3,
    }


def sleep_and_wake(rollout: RolloutGroup) -> dict[str, Any]:
    """Seconds to give memory back and to have it again, and the bytes; the weights are lost."""
    engine = rollout.workers.actors[0]
    begun = time.perf_counter()
    (slept,) = rollout.workers.wait([engine.sleep.remote()], doing="sleep")
    asleep = time.perf_counter()
    rollout.workers.wait([engine.wake_weights.remote()], doing="wake")
    rollout.workers.wait([engine.wake.remote()], doing="wake")
    return {"sleep_s": asleep - begun, "wake_s": time.perf_counter() - asleep} | asdict(slept)


if __name__ == "__main__":
    main()
