"""Seconds in which one vLLM engine, or several that share the device, sample the same number of responses.

    python examples/benchmarks/engines_per_device.py qwen3_1p7b --output result.json
    python examples/benchmarks/engines_per_device.py tiny --device cpu --responses 128

Each engine is vLLM's `LLM` with rlframe's arguments in a process of its own, as with `rollout.engines_per_device`; its
share of the requests begins when that of the others does. Prompts are random, no two alike, and all responses have
their full length. Engines of one number run while there are no others. Weights are random. Of each number: seconds of a
batch, from the first engine's begin to the last one's end, after a batch that warms up; `ratio` is the speed over that
of one engine.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from models_by_size import MODELS, make_model
from rollout_vs_engine import offline, plain, random_requests
from weight_sync import machine

from rlframe.rollout.vllm.config import VllmConfig

START_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], help="numbers of engines, 1 among them")
    parser.add_argument("--requests", type=int, default=256, help="requests of all engines together")
    parser.add_argument("--prompts", type=int, default=170, help="tokens of a prompt")
    parser.add_argument("--responses", type=int, default=512, help="tokens of a response")
    parser.add_argument("--cache-gb", type=float, default=22.0, help="key-value caches of all engines together")
    parser.add_argument("--repeats", type=int, default=3, help="timed batches, after one that warms up")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="file of the result")
    arguments = parser.parse_args()
    sizes = ("model", "requests", "prompts", "responses", "cache_gb")
    result: dict[str, Any] = {"machine": machine(), **{name: getattr(arguments, name) for name in sizes}, "engines": {}}
    with tempfile.TemporaryDirectory() as folder:
        make_model(MODELS[arguments.model], Path(folder))
        for number in arguments.engines:
            result["engines"][number] = seconds_of(number, Path(folder), arguments)
            print(number, json.dumps(result["engines"][number]), flush=True)
    alone = result["engines"][1]["seconds"]
    result["ratio"] = {number: alone / found["seconds"] for number, found in result["engines"].items()}
    print(json.dumps(result["ratio"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def seconds_of(number: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of batches that `number` engines share."""
    # An engine's process must not inherit CUDA's state.
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes = []
    for _ in range(number):
        own, other = context.Pipe()
        processes.append(context.Process(target=serve, args=(other, folder, number, arguments)))
        processes[-1].start()
        ends.append(own)
    try:
        begun = time.perf_counter()
        receive(ends)
        start_s = time.perf_counter() - begun
        seconds = []
        for repeat in range(arguments.repeats + 1):
            begun = time.perf_counter()
            for index, end in enumerate(ends):
                end.send(repeat * number + index)
            receive(ends)
            seconds.append(time.perf_counter() - begun)
    finally:
        for process in processes:
            # vLLM's core is a process of its own, and would keep the memory of the device.
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.join()
    tokens = arguments.requests * arguments.responses
    median = statistics.median(seconds[1:])
    return {"seconds": median, "all_s": seconds, "tokens_per_s": tokens / median, "start_s": start_s}


def receive(ends: list[Connection]) -> None:
    """Waits until every engine has said that it is done."""
    for end in ends:
        if not end.poll(START_LIMIT_S):
            raise SystemExit(f"an engine has said nothing for {START_LIMIT_S:g} s")
        end.recv()


def serve(end: Connection, folder: Path, number: int, arguments: argparse.Namespace) -> None:
    """Samples a share of the requests for each seed that arrives. Runs in a process of its own."""
    cuda = arguments.device == "cuda"
    config = VllmConfig(
        max_num_seqs=arguments.requests // number,
        max_model_len=arguments.prompts + arguments.responses,
        kv_cache_gb=arguments.cache_gb / number,
        compile=False,
        enforce_eager=not cuda,
    )
    engine, _ = offline(
        config, cuda=cuda, folder=folder, dtype=torch.bfloat16 if cuda else torch.float32, random_seed=0
    )()
    end.send("started")
    while True:
        seed = end.recv()
        lengths = [arguments.responses] * (arguments.requests // number)
        requests = random_requests(folder, arguments.prompts, lengths, seed=seed)
        prompts = [{"prompt_token_ids": request.input.token_ids.tolist()} for request in requests]
        engine.generate(prompts, [plain(request) for request in requests], use_tqdm=False)
        end.send("done")


if __name__ == "__main__":
    main()
