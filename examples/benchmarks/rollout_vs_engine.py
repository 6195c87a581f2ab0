"""Rollout through rlframe's vLLM engine beside vLLM's own offline `generate`: the same requests, one call.

    python examples/benchmarks/rollout_vs_engine.py qwen3_1p7b --output result.json
    python examples/benchmarks/rollout_vs_engine.py path/to/model --requests 64 --prompt 100 --response 200
    python examples/benchmarks/rollout_vs_engine.py tiny --device cpu --repeats 1
    python examples/benchmarks/rollout_vs_engine.py qwen3_1p7b --group 8 --cases offline rlframe rlframe_unshared
    python examples/benchmarks/rollout_vs_engine.py qwen3_1p7b --requests 384 --at-once 64 --cases offline rlframe

The model is a name of models_by_size.py, with random weights, or a folder in Hugging Face format. Prompts are random
tokens, `--group` of them alike, and all responses have their full length. With `--at-once` engines run so many
requests at a time, whose responses have lengths between an eighth of the full one and that. The cases, in engines with
equal arguments, one after the other:

    offline            vLLM's `LLM.generate`: no logprobs, no seeds, end-of-sequence ignored
    offline_seeded     with a seed for each request and a stop token that min_tokens forbids, as rlframe asks
    async              the requests of `offline` through `AsyncLLM.generate`, which rlframe uses
    rlframe            `VllmEngine.generate`, which returns tokens, logprobs and versions
    rlframe_logprobs   the same with vLLM's own logprobs instead of rlframe's record
    rlframe_one_process   `rlframe` with worker_process=false
    rlframe_unshared   `rlframe` with share_prompts=false
    rlframe_two_steps  `rlframe` with two steps under way, as vLLM has, in place of three
    rlframe_cublas     `rlframe` without kernels of its own for products of few rows
    rlframe_at_once    `rlframe` that admits each request as soon as it fits, as vLLM does
    rlframe_vllms_runner  `rlframe` with the model runner that vLLM chooses for the model

Of each case: seconds of a batch, its tokens per second, milliseconds of a decode step (a batch less one of one token a
response; with `--at-once` those of a token of each place), and CPU seconds of this process. `ratios` has the speed of
each over that of `offline`.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from models_by_size import MODELS, make_model
from weight_sync import machine

from rlframe.models.hub import read_config
from rlframe.rollout.vllm.config import VllmConfig
from rlframe.rollout.vllm.decode.ahead import ENTRIES, FEW_ROWS, KEY, SECOND, STEP_COST
from rlframe.rollout.vllm.engine import VllmEngine
from rlframe.rollout.vllm.launch import DEFAULTS, engine_arguments, environment
from rlframe.types.input import ModelInput
from rlframe.types.rollout import GenerationRequest, SamplingParams

DEPENDENT = "TORCHINDUCTOR_ENABLE_PDL"
"""Environment variable of Inductor by which its kernels begin before the one ahead has ended."""
SHAPES = {"smollm2_135m": (512, 40, 12), "tiny": (16, 8, 8)}
"""Requests, tokens of a prompt and of a response, by model."""
SHAPE = (256, 170, 512)
"""The same of all other models."""
FREE_S = 120.0
"""Seconds that the first engine's processes may take to give their memory back."""
Batch = Callable[[list[GenerationRequest]], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"one of {', '.join(MODELS)}, or a folder")
    parser.add_argument("--requests", type=int, help="number of requests")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt")
    parser.add_argument("--response", type=int, help="tokens of a response")
    parser.add_argument("--group", type=int, default=1, help="requests with the same prompt")
    parser.add_argument("--at-once", type=int, help="requests that run at a time, with responses of several lengths")
    parser.add_argument("--repeats", type=int, default=3, help="timed batches, after one that warms up")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--memory", type=float, default=0.6, help="the engines' gpu_memory_utilization")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each engine, experts split over them whole")
    parser.add_argument("--compile", action="store_true", help="let Inductor compile the model")
    parser.add_argument("--output", type=Path, help="file of the result")
    arguments = parser.parse_args()
    shape = SHAPES.get(arguments.model, SHAPE)
    given = (arguments.requests, arguments.prompt, arguments.response)
    shape = tuple(own or usual for own, usual in zip(given, shape, strict=True))
    with ExitStack() as stack:
        folder = Path(arguments.model)
        if arguments.model in MODELS:
            made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder = make_model(MODELS[arguments.model], made)
        result = compare(folder, shape, arguments)
    text = json.dumps({"model": arguments.model, "machine": machine()} | result, indent=1)
    print(text, flush=True)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def compare(folder: Path, shape: tuple[int, ...], arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the cases of both engines."""
    count, prompt, response = shape
    cuda = arguments.device == "cuda"
    config = VllmConfig(
        max_num_seqs=arguments.at_once or count,
        max_model_len=prompt + response,
        gpu_memory_utilization=arguments.memory,
        tp=arguments.tp,
        expert_parallel=arguments.tp > 1 and bool(read_config(folder).get("num_experts")),
        compile=arguments.compile,
        enforce_eager=not cuda,
    )
    has_weights = any(folder.glob("*.safetensors"))
    start = {
        "folder": folder,
        "dtype": torch.bfloat16 if cuda else torch.float32,
        "random_seed": None if has_weights else 0,
    }
    found: dict[str, Any] = {}
    engines = [(OFFLINE, offline(config, cuda=cuda, **start)), (OURS, ours(config, cuda=cuda, **start))]
    engines += [((name,), ours(replace(config, **changes), cuda=cuda, **start)) for name, changes in CHANGED.items()]
    for names, started in engines:
        if chosen := [name for name in names if name in arguments.cases]:
            begun = time.perf_counter()
            engine, close = started()
            print(f"{', '.join(chosen)}: started in {time.perf_counter() - begun:.1f} s", flush=True)
            for name in chosen:
                found[name] = measured(CASES[name](engine), shape, arguments, folder=folder)
                print(f"{name}: {json.dumps(found[name])}", flush=True)
            close()
            del engine, close
            if cuda:
                wait_for_memory()
    result = {"requests": count, "prompt_tokens": prompt, "response_tokens": response}
    result |= {"group": arguments.group, "at_once": arguments.at_once}
    result |= {"tp": arguments.tp, "compile": arguments.compile}
    if "offline" in found:
        result["ratios"] = {name: found["offline"]["seconds"] / case["seconds"] for name, case in found.items()}
        print(f"ratios: {result['ratios']}", flush=True)
    return result | {"cases": found}


def measured(batch: Batch, shape: tuple[int, ...], arguments: argparse.Namespace, *, folder: Path) -> dict[str, Any]:
    """Returns medians over batches of new prompts, after one that is not counted."""
    count, prompt, response = shape
    places = arguments.at_once or count
    seconds: dict[int, list[float]] = {1: [], response: []}
    cpu_s = []
    num_tokens = 0
    for seed in range(arguments.repeats + 1):
        for length, found in seconds.items():
            lengths = lengths_of(count, length, spread=arguments.at_once is not None)
            named = {"seed": 2 * seed + (length == 1), "group": arguments.group}
            requests = random_requests(folder, prompt, lengths, **named)
            begun, cpu = time.perf_counter(), time.process_time()
            batch(requests)
            found.append(time.perf_counter() - begun)
            if length == response:
                cpu_s.append(time.process_time() - cpu)
                num_tokens = sum(lengths)
    whole, first = (statistics.median(found[1:]) for found in (seconds[response], seconds[1]))
    decoding = whole - (0 if arguments.at_once else first)
    return {
        "seconds": whole,
        "tokens_per_s": num_tokens / whole,
        "step_ms": decoding / max(num_tokens / places - (arguments.at_once is None), 1) * 1e3,
        "first_token_s": first,
        "cpu_s": statistics.median(cpu_s[1:]),
        "all_s": seconds[response],
    }


def lengths_of(count: int, most: int, *, spread: bool) -> list[int]:
    """Returns the tokens of each response: `most`, or between an eighth of that and all of it, the same in each
    batch."""
    generator = random.Random(count)
    return [generator.randint(max(most // 8, 1), most) if spread else most for _ in range(count)]


def random_requests(
    folder: Path, prompt: int, lengths: list[int], *, seed: int, group: int = 1
) -> list[GenerationRequest]:
    """Random prompts, `group` requests after each other with the same; the responses have `lengths` tokens."""
    generator = random.Random(seed)
    vocabulary = read_config(folder)["vocab_size"]
    inputs = [
        ModelInput(tuple(generator.randrange(3, vocabulary) for _ in range(prompt)))
        for _ in range(-(-len(lengths) // group))
    ]
    return [
        GenerationRequest(
            input=inputs[index // group],
            sampling=SamplingParams(max_tokens=length, min_tokens=length),
            seed=seed * len(lengths) + index,
        )
        for index, length in enumerate(lengths)
    ]


def offline(config: VllmConfig, *, cuda: bool, **start: Any) -> Callable[[], tuple[Any, Callable[[], None]]]:
    """Returns what starts vLLM's LLM. It returns the engine, and what closes it."""

    def started() -> tuple[Any, Callable[[], None]]:
        # vLLM's processes read it. Those of the next engine get what rlframe sets.
        os.environ |= {**DEFAULTS, **environment(config, cuda=cuda), DEPENDENT: "0"}
        from vllm import LLM, EngineArgs

        # Without what rlframe adds for speed, but for the loader, which makes the weights.
        alone = replace(config, share_prompts=False, worker_process=False)
        arguments = engine_arguments(alone, cuda=cuda, **start)
        own = {"scheduler_cls": None, "additional_config": {}}
        engine = LLM(**{each.name: getattr(arguments, each.name) for each in fields(EngineArgs)} | own)
        del os.environ[DEPENDENT]

        def close() -> None:
            engine.llm_engine.engine_core.shutdown()
            gc.collect()

        return engine, close

    return started


def ours(config: VllmConfig, *, cuda: bool, **start: Any) -> Callable[[], tuple[Any, Callable[[], None]]]:
    """Returns what starts rlframe's engine. It returns the engine, and what closes it."""

    def started() -> tuple[Any, Callable[[], None]]:
        engine = VllmEngine(config, device="cuda" if cuda else "cpu", **start)
        engine.gate.commit(0)
        return engine, engine.close

    return started


def plain(request: GenerationRequest) -> Any:
    """The parameters of a request for tokens alone."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Parameters

    return Parameters(
        max_tokens=request.sampling.max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def seeded(request: GenerationRequest) -> Any:
    """The parameters of a request for tokens alone, as rlframe restricts them."""
    parameters = plain(request)
    parameters.seed, parameters.min_tokens = request.seed, request.sampling.min_tokens
    parameters.stop_token_ids = [2]
    return parameters


def through_llm(parameters: Callable[[GenerationRequest], Any]) -> Callable[[Any], Batch]:
    """Returns the case of vLLM's `LLM.generate`."""

    def case(engine: Any) -> Batch:
        def batch(requests: list[GenerationRequest]) -> None:
            prompts = [{"prompt_token_ids": request.input.token_ids.tolist()} for request in requests]
            answers = engine.generate(prompts, [parameters(request) for request in requests], use_tqdm=False)
            check([answer.outputs[0].token_ids for answer in answers], requests)

        return batch

    return case


def through_async_llm(engine: VllmEngine) -> Batch:
    """The case of `AsyncLLM.generate`."""

    async def one(request: GenerationRequest, name: str) -> Any:
        prompt = {"prompt_token_ids": request.input.token_ids.tolist()}
        async for answer in engine._engine.generate(prompt, plain(request), name):
            return answer.outputs[0].token_ids

    async def all_of(requests: list[GenerationRequest]) -> list[Any]:
        return await asyncio.gather(*(one(each, f"plain-{index}") for index, each in enumerate(requests)))

    return lambda requests: check(engine._wait(all_of(requests), doing="generate"), requests)


def through_engine(*, record: bool) -> Callable[[VllmEngine], Batch]:
    """Returns the case of rlframe's engine."""

    def case(engine: VllmEngine) -> Batch:
        fetcher = engine._fetcher

        def batch(requests: list[GenerationRequest]) -> None:
            engine._fetcher = fetcher if record else None
            completions = engine.generate(requests)
            engine._fetcher = fetcher
            assert all(each.logprobs.max() <= 0 for each in completions), "logprobs are negative"
            check([each.token_ids for each in completions], requests)

        return batch

    return case


def check(responses: list[Any], requests: list[GenerationRequest]) -> None:
    """Checks that all responses are full."""
    lengths = [len(each) for each in responses]
    assert lengths == [each.sampling.max_tokens for each in requests], f"responses are full, got {lengths}"


def wait_for_memory() -> None:
    """Waits until the processes of the engine before have given the GPU's memory back."""
    deadline = time.monotonic() + FREE_S
    while (sizes := torch.cuda.mem_get_info())[0] < 0.9 * sizes[1]:
        assert time.monotonic() < deadline, f"{sizes[0] >> 20} of {sizes[1] >> 20} MiB are free"
        time.sleep(0.5)


def without(entry: str) -> dict[str, Any]:
    """Returns settings of an engine without an entry of those that rlframe's have."""
    return {"engine_options": {"additional_config": {key: value for key, value in ENTRIES.items() if key != entry}}}


OFFLINE: dict[str, Callable[[Any], Batch]] = {
    "offline": through_llm(plain),
    "offline_seeded": through_llm(seeded),
}
OURS: dict[str, Callable[[Any], Batch]] = {
    "async": through_async_llm,
    "rlframe": through_engine(record=True),
    "rlframe_logprobs": through_engine(record=False),
}
CHANGED = {
    "rlframe_one_process": {"worker_process": False},
    "rlframe_unshared": {"share_prompts": False},
    "rlframe_two_steps": without(KEY),
    "rlframe_cublas": without(FEW_ROWS),
    "rlframe_at_once": without(STEP_COST),
    "rlframe_vllms_runner": without(SECOND),
}
"""Settings of engines of their own, by the name of the case."""
CASES = OFFLINE | OURS | dict.fromkeys(CHANGED, through_engine(record=True))


if __name__ == "__main__":
    main()
